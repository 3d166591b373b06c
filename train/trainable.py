"""Which tensors a stage trains: chosen, listed, named for the disk, and shown to have gradients before step 1."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ropex.errors import CheckpointError, OptionError, RopexError
from ropex.loading import set_weights, split_trained
from ropex.lora import LORA_A, LORA_B
from ropex.seam import load_rotary_state, rope_of_model, rotaries, rotary_state
from ropex.train.devices import gathered, held, share
from ropex.train.stages import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
ROTARY_KINDS = ("delta", "tau", "gamma")
LORA_KINDS = ("lora_A", "lora_B")
WEIGHT = "weight"  # of the backbone


@dataclass(frozen=True)
class Trained:
    """One trainable tensor. kind: one of ROTARY_KINDS and LORA_KINDS, or WEIGHT."""

    name: str
    kind: str
    parameter: nn.Parameter


def choose(model: "PreTrainedModel", stage: Stage, ada_freq: bool, ada_scale: bool, all_pairs: bool = False) -> None:
    """Freeze everything but for a full stage, then open what the stage trains (LoRA has to be there already).

    Unless all_pairs, delta stays 0 for pairs that do not turn once within the target: over all distances that there are
    their cosine only falls or hardly so, and the loss of text, to which what is far away is mostly noise, makes them
    turn faster. That costs recall from afar, and gains no NLL (docs/results.md)."""
    spec: Any = model.ropex_spec
    learned = spec.learned
    model.requires_grad_(stage.full)
    for rotary in rotaries(model):
        rotary.delta.requires_grad_(stage.rotary and learned and ada_freq)
        if rotary.delta.requires_grad and not all_pairs:
            rotary.delta.register_hook(partial(_without, rotary.theta0 * spec.target < 2 * math.pi))
        rotary.tau.requires_grad_(stage.rotary and learned and ada_scale)
        rotary.gamma.requires_grad_(stage.rotary and learned and ada_scale)
    for _, a, b in lora_matrices(model):
        a.requires_grad_(stage.lora)
        b.requires_grad_(stage.lora)


def _without(slow: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of delta [heads, F], without that of slow pairs [F]."""
    return gradient.masked_fill(slow.to(gradient.device), 0)


def lora_targets(model: "PreTrainedModel") -> list[str]:
    """Names of the projections that rotation acts on, as the family calls them."""
    return list(rope_of_model(model).family.projections)


def add_lora(model: "PreTrainedModel", r: int, alpha: int, seed: int) -> None:
    """LoRA beside the query and key projections, in place: A random from the seed, B zero, both float32."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=r, lora_alpha=alpha, target_modules=lora_targets(model), lora_dropout=0.0, bias="none")
    with seeded(seed):
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for _, a, b in lora_matrices(model):  # injected in the backbone's dtype, where small steps round to nothing
        a.data, b.data = a.data.float(), b.data.float()


def lora_matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """(module name, A [r, in], B [out, r]) of every adapted projection."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            a: Any = module.lora_A[ADAPTER]
            b: Any = module.lora_B[ADAPTER]
            yield name, a.weight, b.weight


def trainable(model: nn.Module) -> list[Trained]:
    """Every tensor that takes gradients, once each, by its checkpoint name."""
    clean = {id(a): name + LORA_A for name, a, _ in lora_matrices(model)}
    clean |= {id(b): name + LORA_B for name, _, b in lora_matrices(model)}
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = clean.get(id(parameter), name)
            kind = name.rpartition(".")[2]
            found.append(Trained(name, kind if kind in ROTARY_KINDS + LORA_KINDS else WEIGHT, parameter))
    return found


def counts(tensors: list[Trained]) -> dict[str, dict[str, int]]:
    """{kind: {"tensors", "numbers"}} in the order of the kinds."""
    return {
        kind: {"tensors": len(mine), "numbers": sum(t.parameter.numel() for t in mine)}
        for kind in (*ROTARY_KINDS, *LORA_KINDS, WEIGHT)
        if (mine := [t for t in tensors if t.kind == kind])
    }


def trained_state(model: nn.Module, keep: bool = True) -> dict[str, torch.Tensor]:
    """What a run keeps, float32 on the CPU: all rotary tensors, LoRA's matrices, and whole weights that are trained.

    A weight in shards takes every process to gather it; keep: False gives the others an empty dict for their help."""
    weights = ((t.name, gathered(t.parameter.detach())) for t in trainable(model) if t.kind == WEIGHT)
    if not keep:
        for _ in weights:
            pass
        return {}
    state = rotary_state(model)
    state |= {name: weight.float().cpu().clone() for name, weight in weights}
    for name, a, b in lora_matrices(model):
        state[name + LORA_A] = a.detach().float().cpu().clone()
        state[name + LORA_B] = b.detach().float().cpu().clone()
    return state


@torch.no_grad()
def restore(model: "PreTrainedModel", state: Mapping[str, torch.Tensor], where: str) -> None:
    """Copy a trained_state back into the model it came from; a missing, extra or mis-shaped tensor is an error."""
    rotary, lora, weights = split_trained(dict(state))
    load_rotary_state(model, rotary, where)
    parameters = dict(model.named_parameters())
    set_weights(model, {n: share(w, parameters[n]) if n in parameters else w for n, w in weights.items()}, where)
    places: dict[str, nn.Parameter] = {}
    for name, a, b in lora_matrices(model):
        places |= {name + LORA_A: a, name + LORA_B: b}
    if odd := sorted(set(places) ^ set(lora)):
        raise CheckpointError(f"{where} {'lacks' if odd[0] in places else 'has'} {odd[0]}: it is of another run")
    for name, value in lora.items():
        if value.shape != places[name].shape:
            raise CheckpointError(f"{where}: {name} is {list(value.shape)}, not {list(places[name].shape)}")
        places[name].copy_(value)


def check_gradients(model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    """One forward and backward: every trainable tensor must get a gradient that is finite and not zero throughout.

    B is zero in fresh LoRA, which makes A's gradient zero too; so B holds noise during this check. Weights, gradients
    and random state are afterwards what they were before.
    """
    tensors = trainable(model)
    if not tensors:
        raise OptionError("nothing to train: the rotary method has no learned part (convert with --to adarope)")
    try:
        with seeded(0), _noisy_b(model):
            loss().backward()
        absent = [t.name for t in tensors if t.kind != WEIGHT and t.parameter.grad is None]
        wild = [t.name for t in tensors if t.parameter.grad is not None and not held(t.parameter.grad).isfinite().all()]
        # an expert that no token of the probe goes to has no gradient either, so whole weights may have none
        still = [
            t.name for t in tensors if t.kind != WEIGHT and t.parameter.grad is not None and not t.parameter.grad.any()
        ]
    finally:
        for tensor in tensors:
            tensor.parameter.grad = None
    problems = (
        ("no gradient", absent),
        ("a gradient that is not finite", wild),
        ("a gradient of zero", still),
    )
    said = [f"{what} reaches {_some(names)}" for what, names in problems if names]
    if said:
        raise RopexError(f"training would not train everything: {'; '.join(said)}. Nothing was changed")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@contextmanager
def _noisy_b(model: nn.Module) -> Iterator[None]:
    matrices = [b for _, _, b in lora_matrices(model)]
    before = [b.detach().clone() for b in matrices]
    try:
        with torch.no_grad():
            for b in matrices:
                b.add_(torch.randn_like(b), alpha=0.01)
        yield
    finally:
        with torch.no_grad():
            for b, value in zip(matrices, before, strict=True):
                b.copy_(value)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's random numbers from a seed inside, and as if nothing was drawn afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def spread(model: nn.Module) -> dict[str, list[float]]:
    """[min, median, max] of tau, gamma and |delta| over all layers and heads."""
    found = rotaries(model)
    out: dict[str, list[float]] = {}
    values: Any
    for kind in ROTARY_KINDS:
        values = torch.cat([getattr(r, kind).detach().flatten() for r in found])
        values = values.abs() if kind == "delta" else values
        name = "|delta|" if kind == "delta" else kind
        out[name] = [float(v) for v in (values.min(), values.median(), values.max())]
    return out
