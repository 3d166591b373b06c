"""What a checkpoint's config says about its rotary embedding, in either spelling. Needs no torch.

transformers 5 nests everything in `rope_parameters`; transformers 4 has `rope_theta` beside `rope_scaling`. A reader
that knows only one of them silently falls back to a base of 10000, so both are read, compared, and both are written.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropex.errors import CheckpointError
from ropex.families import Family, family

ADAROPE = "adarope"  # key of our block in config.json, and prefix of the model_type of a per-head checkpoint
_LEGACY_NAMES = {"su": "longrope", None: "default"}
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class Rope:
    """The rotary embedding as the config states it.

    rope_type: transformers' name (default, linear, dynamic, yarn, llama3, longrope, proportional).
    rope_theta: the base. scaling: every other parameter of the type.
    window: tokens the model was trained for; what yarn extended does not count.
    max_position_embeddings: tokens that the config claims.
    """

    rope_type: str
    rope_theta: float
    scaling: dict[str, Any]
    window: int
    max_position_embeddings: int
    head_dim: int
    rotary_dim: int
    heads: int
    kv_heads: int
    layers: int
    family: Family = field(repr=False)

    @property
    def pairs(self) -> int:
        """F: channel pairs a head's rotary covers."""
        return self.rotary_dim // 2


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a CheckpointError that says what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: give a Hugging Face checkpoint folder") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}): download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object: download the file again")
    return value


def backbone_type(config: dict[str, Any]) -> str | None:
    """The stock model_type: our own block names the backbone inside."""
    return config[ADAROPE]["backbone"] if ADAROPE in config else config.get("model_type")


def rope_of(config: dict[str, Any]) -> Rope:
    """Read config.json's content; contradictions and impossible values are errors that name key and value."""
    fam = family(backbone_type(config))
    try:
        layers, heads, hidden = (int(config[k]) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
        claimed = int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error} is missing or not a number: download it again") from None
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} query heads do not divide among {kv_heads} key/value heads")
    rope_type, theta, scaling = _rope_block(config)
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * partial)
    window = claimed
    if rope_type == "yarn":
        window = int(scaling.get("original_max_position_embeddings") or claimed)
    if ADAROPE in config:
        window = int(config[ADAROPE]["window"])
    return Rope(rope_type, theta, scaling, window, claimed, head_dim, rotary_dim, heads, kv_heads, layers, fam)


def _rope_block(config: dict[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """(rope_type, rope_theta, the other parameters) from both spellings, which must agree."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, block in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(block, dict):
            raise CheckpointError(f"config.json: {name} is {block!r}, not an object")
    merged: dict[str, Any] = {}
    sources = {"rope_scaling": _canonical(old, "rope_scaling"), "rope_parameters": _canonical(new, "rope_parameters")}
    if "rope_theta" in config and config["rope_theta"] is not None:
        sources["the top level"] = {"rope_theta": config["rope_theta"]}
    seen: dict[str, str] = {}
    for source, block in sources.items():
        for key, value in block.items():
            if key in merged and merged[key] != value:
                raise CheckpointError(
                    f"config.json gives {key} twice: {merged[key]!r} in {seen[key]} and {value!r} in {source}. "
                    "Readers disagree about which one counts: make them equal or delete the wrong one"
                )
            merged[key], seen[key] = value, source
    rope_type = merged.pop("rope_type", "default")
    theta = _number(merged.pop("rope_theta", _DEFAULT_THETA), "rope_theta", 1.0)
    if "factor" in merged and merged["factor"] is not None:
        merged["factor"] = _number(merged["factor"], "factor", 1.0 if rope_type != "proportional" else 0.0)
    for key in ("short_factor", "long_factor"):
        if key in merged:
            if not isinstance(merged[key], list):
                raise CheckpointError(f"config.json: {key} is {merged[key]!r}, not a list of numbers")
            merged[key] = [_number(v, key, 0.0) for v in merged[key]]
    return rope_type, theta, merged


def _canonical(block: dict[str, Any], where: str) -> dict[str, Any]:
    """One name for the type: `rope_type`; the old `type` may stand beside it if it says the same."""
    block = {k: v for k, v in block.items() if v is not None}
    if not block:
        return {}
    old, new = block.pop("type", None), block.get("rope_type")
    names = {_LEGACY_NAMES.get(n, n) for n in (old, new) if n is not None}
    if len(names) > 1:
        raise CheckpointError(f"config.json: {where} says type {old!r} and rope_type {new!r}: delete the wrong one")
    if any(not isinstance(n, str) for n in names):
        raise CheckpointError(f"config.json: {where} has the type {names.pop()!r}, not a name")
    if names:
        block["rope_type"] = names.pop()
    return block


def _number(value: Any, key: str, at_least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"config.json: {key} is {value!r}, not a finite number")
    if value < at_least:
        raise CheckpointError(f"config.json: {key} is {value!r}, below {at_least:g}")
    return float(value)


def write_rope(config: dict[str, Any], rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """A copy of config with this rope block in both spellings, equal to each other."""
    out = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_scaling", "rope_theta")}
    block = {k: v for k, v in rope_parameters.items() if v is not None}
    scaling = {k: v for k, v in block.items() if k != "rope_theta"}
    return out | {
        "rope_parameters": block,
        "rope_theta": block["rope_theta"],
        "rope_scaling": None if block["rope_type"] == "default" else scaling,
    }
