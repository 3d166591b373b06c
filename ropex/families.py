"""The architectures that ropex knows, as data. To add one is to add an entry and its row of tests."""

from dataclasses import dataclass
from typing import Literal

from ropex.errors import UnsupportedError

Pairing = Literal["half-split", "interleaved"]


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps what conversion touches.

    model_type: the config's name for it.
    attention: class name of its attention layer in transformers; that class's modeling file holds the
        `apply_rotary_pos_emb` which the layer calls.
    config_class, causal_lm, base_model: class names in transformers, for the exported modeling file.
    pairing: which channels its modeling code turns together.
    q_proj, k_proj, v_proj, o_proj: names of the projections inside the attention layer.
    """

    model_type: str
    attention: str
    config_class: str
    causal_lm: str
    base_model: str
    pairing: Pairing = "half-split"
    q_proj: str = "q_proj"
    k_proj: str = "k_proj"
    v_proj: str = "v_proj"
    o_proj: str = "o_proj"


FAMILIES: dict[str, Family] = {
    f.model_type: f for f in (Family("llama", "LlamaAttention", "LlamaConfig", "LlamaForCausalLM", "LlamaModel"),)
}


def family(model_type: str | None) -> Family:
    """The registry entry of a config's model_type; an unknown one is refused by name."""
    try:
        return FAMILIES[model_type or ""]
    except KeyError:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(
            f"architecture '{model_type}' is not supported: ropex knows {known}. "
            "Converting an unknown attention layer could give a silently wrong model."
        ) from None
