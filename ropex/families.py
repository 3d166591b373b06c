"""The architectures that ropex knows, as data. To add one is to add an entry and its row of tests. Needs no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from ropex.errors import UnsupportedError

Pairing = Literal["half-split", "interleaved"]
Fused = Literal["q-k-v", "per head"]


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps what conversion touches, and how its modeling code rotates.

    model_type: the config's name for it. classes: what its class names in transformers start with.
    config_class, base_model: where these do not follow from `classes`.
    pairing: which channels the modeling code turns together.
    layer: the attention layer's name in a checkpoint, with {} for its number.
    q_proj, k_proj, v_proj, o_proj: names inside that layer. fused: the one projection that holds q, k and v, and
        `order`, how: all of q, then k, then v; or a head's q, k and v together.
    gated: a head's rows of q_proj are its query, then its gate.
    q_norm, k_norm: norms between projection and rotation, where a checkpoint may have them. unit_offset: these
        multiply by 1 + weight; norm_flag: the config key that says whether they are there, where they may be absent.
    partial: the share of a head's channels that turns where the config is silent; None where all do.
    theta, head_dim, kv_heads: what the config class takes where config.json is silent. head_dim None: hidden/heads;
        kv_heads None: as many as query heads.
    float32: the modeling code rotates in float32, whatever the model's dtype: with float32's cosines, or with cosines
        rounded to that dtype first. longrope_only: its config knows no other scaling.
    rotating: the `layer_types` that turn, or `no_rope_layers` where a list of flags says it; None: all layers do.
    period: every period-th layer is the odd one where no list is given, and the config key that changes that number.
    two_tables: sliding and full attention have a rope of their own each.
    """

    model_type: str
    classes: str
    config_class: str = ""
    base_model: str = ""
    pairing: Pairing = "half-split"
    layer: str = "model.layers.{}.self_attn"
    q_proj: str = "q_proj"
    k_proj: str = "k_proj"
    v_proj: str = "v_proj"
    o_proj: str = "o_proj"
    fused: str = ""
    order: Fused = "q-k-v"
    gated: bool = False
    q_norm: str = ""
    k_norm: str = ""
    unit_offset: bool = False
    norm_flag: str = ""
    partial: float | None = None
    theta: float = 10_000.0
    head_dim: int | None = None
    kv_heads: int | None = None
    float32: Literal["", "throughout", "of rounded cosines"] = ""
    longrope_only: bool = False
    rotating: str | None = None
    period: tuple[str, int] = ("", 0)
    two_tables: bool = False

    @property
    def attention(self) -> str:
        """Class of the attention layer; its modeling file holds the apply_rotary_pos_emb that it calls."""
        return f"{self.classes}Attention"

    @property
    def causal_lm(self) -> str:
        return f"{self.classes}ForCausalLM"

    @property
    def config_name(self) -> str:
        return self.config_class or f"{self.classes}Config"

    @property
    def base_name(self) -> str:
        return self.base_model or f"{self.classes}Model"

    @property
    def projections(self) -> tuple[str, ...]:
        """The modules whose rows become queries and keys."""
        return (self.fused,) if self.fused else (self.q_proj, self.k_proj)


def _head_norms(name: str = "{}_norm") -> dict[str, Any]:
    return {"q_norm": name.format("q"), "k_norm": name.format("k")}


FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("llama", "Llama"),
        Family("mistral", "Mistral", kv_heads=8),
        Family("mixtral", "Mixtral", kv_heads=8, theta=1e6),
        Family("qwen2", "Qwen2", kv_heads=32),
        Family("qwen2_moe", "Qwen2Moe", kv_heads=16),
        Family("qwen3", "Qwen3", kv_heads=32, head_dim=128, **_head_norms()),
        Family("qwen3_moe", "Qwen3Moe", kv_heads=4, **_head_norms()),
        Family(
            "qwen3_next", "Qwen3Next", kv_heads=2, head_dim=256, partial=0.25, gated=True, unit_offset=True,
            rotating="full_attention", period=("full_attention_interval", 4), **_head_norms(),
        ),
        Family("gemma", "Gemma", kv_heads=16, head_dim=256),
        Family("gemma2", "Gemma2", kv_heads=4, head_dim=256),
        Family(
            "gemma3_text", "Gemma3", "Gemma3TextConfig", "Gemma3TextModel", kv_heads=4, head_dim=256, theta=1e6,
            two_tables=True, period=("sliding_window_pattern", 6), unit_offset=True, **_head_norms(),
        ),
        Family("olmo", "Olmo", float32="throughout"),
        Family("olmo2", "Olmo2", float32="throughout", **_head_norms()),
        Family("olmo3", "Olmo3", theta=5e5, float32="throughout", two_tables=True, period=("", 4), **_head_norms()),
        Family("olmoe", "Olmoe", **_head_norms()),
        Family("phi", "Phi", partial=0.5, o_proj="dense", norm_flag="qk_layernorm", **_head_norms("{}_layernorm")),
        Family("phi3", "Phi3", partial=1.0, fused="qkv_proj", longrope_only=True),
        Family(
            "stablelm", "StableLm", kv_heads=32, partial=0.25, norm_flag="qk_layernorm",
            **_head_norms("{}_layernorm"),
        ),
        Family(
            "gpt_neox", "GPTNeoX", layer="gpt_neox.layers.{}.attention", partial=0.25, o_proj="dense",
            fused="query_key_value", order="per head",
        ),
        Family("glm", "Glm", kv_heads=2, head_dim=128, partial=0.5, pairing="interleaved"),
        Family("glm4", "Glm4", kv_heads=2, head_dim=128, partial=0.5, pairing="interleaved"),
        Family(
            "cohere", "Cohere", theta=5e5, pairing="interleaved", float32="of rounded cosines",
            norm_flag="use_qk_norm", **_head_norms(),
        ),
        Family(
            "cohere2", "Cohere2", pairing="interleaved", float32="of rounded cosines",
            rotating="sliding_attention", period=("sliding_window_pattern", 4),
        ),
        Family("granite", "Granite"),
        Family(
            "smollm3", "SmolLM3", kv_heads=4, theta=2e6, rotating="no_rope_layers",
            period=("no_rope_layer_interval", 4),
        ),
        Family("starcoder2", "Starcoder2", kv_heads=2),
    )
}  # fmt: skip

_ENCODERS = ("bert", "roberta", "modernbert", "nomic_bert", "eurobert", "roformer", "esm")


def family(model_type: str | None, config: dict[str, Any] | None = None) -> Family:
    """The registry entry of a config's model_type. Anything else is refused by name, with the reason where the config
    shows it: a part that looks like another architecture's must never be converted by mistake."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = _reason(model_type, config or {}) or f"ropex knows {', '.join(sorted(FAMILIES))}"
    raise UnsupportedError(f"architecture '{model_type}' is not supported: {reason}")


def _reason(model_type: str | None, config: dict[str, Any]) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("kv_lora_rank"):
        return "its keys come compressed, with the part that turns in slices of other projections (MLA)"
    if "mrope_section" in rope:
        return "its rope has sections for time, height and width"
    if "text_config" in config:
        return "it wraps a language model among others: give that model's checkpoint alone"
    if model_type in _ENCODERS or config.get("is_encoder_decoder"):
        return "it holds an encoder, whose attention looks both ways"
    return None
