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
from ropex.families import Family, Pairing, family

ADAROPE = "adarope"  # key of our block in config.json, and prefix of the model_type of a per-head checkpoint
_LEGACY_NAMES = {"su": "longrope", None: "default"}
FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names for the kinds of layers


@dataclass(frozen=True)
class Rope:
    """The rotary embedding as the config states it.

    rope_type: transformers' name (default, linear, dynamic, yarn, llama3, longrope, proportional).
    rope_theta: the base. scaling: every other parameter of the type.
    window: tokens the model was trained for; what yarn extended does not count.
    max_position_embeddings: tokens that the config claims.
    heads, kv_heads: query and key/value heads a layer. layers: all of them; turning: those that this table turns.
    pairing: which channels turn together in these weights.
    local: the table of the sliding-window layers, where they have one of their own.
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
    turning: tuple[int, ...]
    pairing: Pairing
    family: Family = field(repr=False)
    local: "Rope | None" = None

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
    fam = family(backbone_type(config), config)
    if fam.model_type == "gpt_neox":
        config = {_FOREIGN_KEYS.get(key, key): value for key, value in config.items()}
    try:
        layers, heads, hidden = (int(config[k]) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
        claimed = int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error} is missing or not a number: download it again") from None
    kv_heads = config.get("num_key_value_heads") or (fam.kv_heads or heads)
    head_dim = config.get("head_dim") or (fam.head_dim or hidden // heads)
    if fam.order == "per head":
        kv_heads = heads
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} query heads do not divide among {kv_heads} key/value heads")
    full, sliding = _turning(config, fam, layers)
    pairing = config[ADAROPE].get("pairing", fam.pairing) if ADAROPE in config else fam.pairing

    def rope(block: dict[str, Any], turning: tuple[int, ...], local: Rope | None = None) -> Rope:
        block = dict(block)
        rope_type, theta = block.pop("rope_type", "default"), block.pop("rope_theta")
        rotary_dim = head_dim
        if fam.partial is not None:
            partial = block.setdefault("partial_rotary_factor", fam.partial)
            rotary_dim = int(head_dim * partial)
        elif rope_type != "proportional":  # no reader of these families looks at it
            block.pop("partial_rotary_factor", None)
        if rope_type == "longrope":
            _require_factors(block, rotary_dim // 2)
            if "original_max_position_embeddings" in config:  # Phi-3 keeps it beside the block, and that one counts
                block["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        window = int(block.get("original_max_position_embeddings") or claimed) if rope_type == "yarn" else claimed
        if ADAROPE in config:
            window = int(config[ADAROPE]["window"])
        return Rope(
            rope_type, theta, block, window, claimed, head_dim, rotary_dim, heads, kv_heads, layers, turning, pairing,
            fam, local,
        )  # fmt: skip

    if not fam.two_tables:
        return rope(_rope_block(config, fam.theta), full)
    main, local = _two_blocks(config, fam)
    return rope(main, full, rope(local, sliding))


_FOREIGN_KEYS = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}  # GPT-NeoX


def _turning(config: dict[str, Any], fam: Family, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers that the main table turns, and those of a second table."""
    every = tuple(range(layers))
    if fam.rotating is None and not fam.two_tables:
        return every, ()
    key, default = fam.period
    period = int(config.get(key) or default)
    odd = [(layer + 1) % period == 0 for layer in every]
    if fam.rotating == "no_rope_layers":
        flags = config.get("no_rope_layers") or [not o for o in odd]
        return tuple(layer for layer in every if flags[layer]), ()
    kinds = config.get("layer_types") or [FULL if o else SLIDING for o in odd]
    if len(kinds) < layers:
        raise CheckpointError(f"config.json: layer_types names {len(kinds)} of {layers} layers: download it again")
    if fam.two_tables:
        return tuple(i for i in every if kinds[i] == FULL), tuple(i for i in every if kinds[i] == SLIDING)
    return tuple(i for i in every if kinds[i] == fam.rotating), ()


def _two_blocks(config: dict[str, Any], fam: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rope blocks of full and sliding attention: nested by layer type, or in the older flat spelling, where the
    scaling belongs to full attention alone."""
    nested = config.get("rope_parameters") or {}
    both = {}
    for kind in (FULL, SLIDING):
        flat: dict[str, Any] = {"rope_parameters": nested.get(kind)}
        if kind == FULL:
            flat |= {k: config.get(k) for k in ("rope_scaling", "rope_theta")}
            default = fam.theta
        else:
            flat |= {"rope_theta": config.get("rope_local_base_freq")}
            default = _LOCAL_THETA if fam.model_type == "gemma3_text" else config.get("rope_theta") or fam.theta
        both[kind] = _rope_block(flat, default)
    return both[FULL], both[SLIDING]


_LOCAL_THETA = 10_000.0  # of Gemma 3's sliding layers


def _rope_block(config: dict[str, Any], default_theta: float) -> dict[str, Any]:
    """rope_type, rope_theta and the other parameters from both spellings, which must agree."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, block in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(block, dict):
            raise CheckpointError(f"config.json: {name} is {block!r}, not an object")
    merged: dict[str, Any] = {}
    sources = {"rope_scaling": _canonical(old, "rope_scaling"), "rope_parameters": _canonical(new, "rope_parameters")}
    outside = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    if outside:
        sources["the top level"] = outside
    seen: dict[str, str] = {}
    for source, block in sources.items():
        for key, value in block.items():
            if key in merged and merged[key] != value:
                raise CheckpointError(
                    f"config.json gives {key} twice: {merged[key]!r} in {seen[key]} and {value!r} in {source}. "
                    "Readers disagree about which one counts: make them equal or delete the wrong one"
                )
            merged[key], seen[key] = value, source
    merged["rope_theta"] = _number(merged.get("rope_theta", default_theta), "rope_theta", 1.0)
    if "factor" in merged and merged["factor"] is not None:
        least = 0.0 if merged.get("rope_type") == "proportional" else 1.0
        merged["factor"] = _number(merged["factor"], "factor", least)
    if "partial_rotary_factor" in merged:
        merged["partial_rotary_factor"] = _number(merged["partial_rotary_factor"], "partial_rotary_factor", 0.0)
    for key in ("short_factor", "long_factor"):
        if key in merged:
            if not isinstance(merged[key], list):
                raise CheckpointError(f"config.json: {key} is {merged[key]!r}, not a list of numbers")
            merged[key] = [_number(v, key, 0.0) for v in merged[key]]
    return merged


def _require_factors(block: dict[str, Any], pairs: int) -> None:
    for key in ("short_factor", "long_factor"):
        if len(block.get(key) or ()) != pairs:
            raise CheckpointError(
                f"config.json: {key} has {len(block.get(key) or ())} numbers where the head has {pairs} channel pairs"
            )


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


def canonical(config: dict[str, Any]) -> dict[str, Any]:
    """The config with today's name of its rope type, where an older one stands that readers have forgotten."""
    out = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        block = config.get(key)
        if isinstance(block, dict) and "su" in (block.get("type"), block.get("rope_type")):
            out[key] = {k: v for k, v in block.items() if k != "type"} | {"rope_type": "longrope"}
    return out


def write_rope(
    config: dict[str, Any], rope_parameters: dict[str, Any], local: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A copy of config with this rope block in both spellings, equal to each other. local: the block of the sliding
    layers, for a family that has two."""
    stale = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
    out = {k: v for k, v in config.items() if k not in (*stale, *_FOREIGN_KEYS)}
    block = {k: v for k, v in rope_parameters.items() if v is not None}
    scaling = {k: v for k, v in block.items() if k != "rope_theta"}
    plain = set(scaling) <= {"rope_type", "partial_rotary_factor"} and block["rope_type"] == "default"
    out |= {
        "rope_parameters": block,
        "rope_theta": block["rope_theta"],
        "rope_scaling": None if plain else scaling,
    }
    if "partial_rotary_factor" in block:
        out["partial_rotary_factor"] = block["partial_rotary_factor"]
    if backbone_type(config) == "gpt_neox":
        out |= {old: out[new] for old, new in _FOREIGN_KEYS.items() if new in out}
    if local is None:
        return out
    out["rope_parameters"] = {FULL: block, SLIDING: {k: v for k, v in local.items() if v is not None}}
    if backbone_type(config) == "gemma3_text":
        out["rope_local_base_freq"] = local["rope_theta"]
    return out
