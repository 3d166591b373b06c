"""The one modeling file that a per-head checkpoint carries, and the config that goes with it."""

import inspect
from pathlib import Path
from typing import Any

from ropex.config import ADAROPE, Rope
from ropex.convert.source import MODELING
from ropex.families import Family
from ropex.spec import RotarySpec

_CLASSES = '''

# --- the {family} model with these heads; written by ropex, needs torch and transformers alone -----------------------

from transformers import {config_class}, {causal_lm}, {base_class}  # noqa: E402


class AdaRopeConfig({config_class}):
    """A {family} config whose `adarope` block describes the heads."""

    model_type = "adarope_{family}"


def equip(model, config):
    """Give every attention layer its AdaRotary; the values come with the checkpoint."""
    block = config.adarope

    def make(layer):
        return AdaRotary(
            block["pairs"],
            1 if block["shared"] else block["heads"],
            1 if block["shared"] else block["kv_heads"],
            block["window"],
            log_coef=block["log_coef"],
            interleaved=block["pairing"] == "interleaved",
            length=block["length"],
            upcast={float32!r},
            turn_scale=block["turn_scale"],
        )

    install(model, "{attention}", block["layers"], make)
    model.post_init()


class _Heads:
    config_class = AdaRopeConfig
    _keep_in_fp32_modules_strict = {{"adarope"}}

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, AdaRotary):  # a value that the checkpoint lacks must be loud, not plausible
            for tensor in (module.theta0, module.delta, module.tau, module.gamma):
                if not getattr(tensor, "_is_hf_initialized", False):
                    tensor.fill_(torch.nan)


def know_stored_names():
    """Some tensors are held otherwise than stored (experts one by one, say); transformers looks that up by class or
    model_type, and these are new to it."""
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # before transformers 5 they are held as they are stored
        return
    by_class, by_type = (get_checkpoint_conversion_mapping(name) for name in ("{causal_lm}", "{family}"))
    if mapping := by_class or by_type:
        register_checkpoint_conversion_mapping("adarope_{family}", mapping, overwrite=True)


know_stored_names()


class AdaRopeModel(_Heads, {base_class}):
    def __init__(self, config):
        super().__init__(config)
        equip(self, config)


class AdaRopeForCausalLM(_Heads, {causal_lm}):
    def __init__(self, config):
        super().__init__(config)
        self.get_decoder().__class__ = AdaRopeModel  # transformers asks the body how to initialise what is missing
        equip(self, config)
'''


def write_modeling(folder: Path, family: Family) -> None:
    """Write the file: the core's own rotary source, then the family's classes."""
    import ropex.rotary

    classes = _CLASSES.format(
        family=family.model_type,
        config_class=family.config_name,
        causal_lm=family.causal_lm,
        base_class=family.base_name,
        attention=family.attention,
        float32=family.float32,
    )
    (folder / MODELING).write_text(inspect.getsource(ropex.rotary) + classes, encoding="utf-8")


def adarope_config(config: dict[str, Any], rope: Rope, spec: RotarySpec) -> dict[str, Any]:
    """config.json of a per-head checkpoint: a model_type that stock loaders refuse, the backbone named inside."""
    name = MODELING.removesuffix(".py")
    facts = {
        "backbone": rope.family.model_type,
        "pairs": rope.pairs,
        "heads": rope.heads,
        "kv_heads": rope.kv_heads,
        "layers": list(spec.layers(rope)),
        "shared": spec.shared,
        "turn_scale": spec.turn_scale(rope),
        "log_coef": spec.log_coef,
    }
    return config | {
        "model_type": f"adarope_{rope.family.model_type}",
        "architectures": ["AdaRopeForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{name}.AdaRopeConfig",
            "AutoModel": f"{name}.AdaRopeModel",
            "AutoModelForCausalLM": f"{name}.AdaRopeForCausalLM",
        },
        "max_position_embeddings": spec.target,
        ADAROPE: spec.block() | facts,
    }


def plain_config(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The stock config inside a per-head one; a stock config as it is."""
    if ADAROPE not in config:
        return config
    plain = {k: v for k, v in config.items() if k not in (ADAROPE, "auto_map")}
    return plain | {"model_type": family.model_type, "architectures": [family.causal_lm]}
