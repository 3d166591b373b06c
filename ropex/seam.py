"""attach: make a stock transformers model turn its heads by AdaRotary."""

from typing import TYPE_CHECKING, Any

import torch

from ropex.config import Rope, rope_of
from ropex.errors import CheckpointError, UnsupportedError
from ropex.rotary import AdaRotary, install
from ropex.spec import RotarySpec, method_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROTARY_TENSORS = ("theta0", "delta", "tau", "gamma")


def rope_of_model(model: "PreTrainedModel") -> Rope:
    """The rotary embedding that a stock model's own config states."""
    return rope_of(model.config.to_dict())


def attach(model: "PreTrainedModel", spec: RotarySpec) -> "PreTrainedModel":
    """Put an AdaRotary on every attention layer of a stock model, in place, and return the model.

    The model stays of its class; its state_dict gains `...self_attn.adarope.{theta0,delta,tau,gamma}`. Other models in
    the process are untouched. Errors: UnsupportedError for an unknown architecture or a model that is converted
    already.
    """
    rope = rope_of_model(model)
    if rotaries(model):
        raise UnsupportedError("this model is converted already: load the parent checkpoint, or continue this one")
    layers = spec.layers(rope)
    fresh = {id(own): spec.fresh(own) for own in layers.values()}
    first: dict[int, AdaRotary] = {}

    def make(layer: torch.nn.Module) -> AdaRotary:
        own = layers[layer.layer_idx]  # type: ignore[index]
        values = fresh[id(own)]
        rotary = AdaRotary(
            rope.pairs,
            len(values["tau"]),
            len(values["delta"]),
            spec.window,
            log_coef=spec.log_coef,
            interleaved=spec.pairing == "interleaved",
            length=spec.length,
            upcast=rope.family.float32,
            turn_scale=spec.turn_scale(own),
            device=next(layer.parameters()).device,
        )
        with torch.no_grad():
            for name, value in values.items():
                getattr(rotary, name).copy_(value)
        rotary.delta.requires_grad_(spec.learned and spec.ada_freq)
        rotary.tau.requires_grad_(spec.learned and spec.ada_scale)
        rotary.gamma.requires_grad_(spec.learned and spec.ada_scale)
        if spec.shared:  # one set of parameters for all layers of a table
            same = first.setdefault(id(own), rotary)
            rotary.delta, rotary.tau, rotary.gamma = same.delta, same.tau, same.gamma
        return rotary

    made = install(model, rope.family.attention, layers, make)
    if len(made) != len(layers):
        raise UnsupportedError(
            f"{type(model).__name__} has {len(made)} {rope.family.attention} layers that turn where its config says "
            f"{len(layers)}"
        )
    model.ropex_spec = spec  # type: ignore[assignment]
    model.save_pretrained = _refuse_to_save  # type: ignore[method-assign]
    return model


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    """A stock loader would read such a folder as the plain parent and drop the rotary tensors."""
    raise UnsupportedError("a converted model is not saved by save_pretrained: use `ropex convert` or `ropex export`")


def rotaries(model: torch.nn.Module) -> list[AdaRotary]:
    """The AdaRotary modules of a model, in layer order; empty for a stock one."""
    return [m for m in model.modules() if isinstance(m, AdaRotary)]


def rotary_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every rotary tensor by its checkpoint name, float32, on the CPU; shared ones appear once a layer."""
    return {
        f"{name}.{tensor}": getattr(module, tensor).detach().float().cpu().clone()
        for name, module in model.named_modules()
        if isinstance(module, AdaRotary)
        for tensor in ROTARY_TENSORS
    }


def load_rotary_state(model: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Copy rotary tensors into a converted model; a missing, mis-shaped or extra one is an error that names it."""
    expected = rotary_state(model)
    for name, current in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{where} lacks the rotary tensor {name}: the checkpoint is incomplete")
        if tensors[name].shape != current.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(tensors[name].shape)} where {list(current.shape)} is expected"
            )
        if tensors[name].dtype != torch.float32:
            raise CheckpointError(f"{where}: {name} is {tensors[name].dtype}; rotary tensors are float32")
        if not torch.isfinite(tensors[name]).all():
            raise CheckpointError(f"{where}: {name} has values that are not finite numbers")
    if extra := sorted(set(tensors) - set(expected)):
        raise CheckpointError(f"{where} has a rotary tensor that its config does not know: {extra[0]}")
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, value in tensors.items():
            module, _, tensor = name.rpartition(".")
            getattr(modules[module], tensor).copy_(value)


def method_of(model: "PreTrainedModel") -> str:
    """The rotary method of a loaded model, in our terms."""
    spec: Any = getattr(model, "ropex_spec", None)
    return spec.method if spec is not None else method_name(model.config.to_dict())
