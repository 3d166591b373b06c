"""Every rotary method: its frequency table, its scale, and how a stock config spells it. One registry, METHODS.

Frequencies are radians per token, float32, one per channel pair, fastest first; 0 means the pair does not rotate.
torch is imported where tables are computed, so that names and help cost nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ropex.config import Rope
from ropex.errors import OptionError

if TYPE_CHECKING:
    import torch

Params = Mapping[str, Any]
RopeParameters = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """theta: frequencies [F]. attention_factor: m, multiplied into both q and k, so the logits grow by m^2.
    log_coef: c in the length-dependent scale (1 + c ln max(1, L/window))^2; 0 means no such scale."""

    theta: "torch.Tensor"
    attention_factor: float = 1.0
    log_coef: float = 0.0


@dataclass(frozen=True)
class Method:
    """One way to set the frequencies.

    stock(rope, params): the rope_parameters block that makes transformers compute this table.
    ours(rope, params): our own table [F], where the method is not transformers' own.
    params: what the user may set, with defaults; None means derived from factor and window.
    log_coef: c of Table. summary: one line for help and docs. heals: True when it needs training to be of use.
    """

    name: str
    summary: str
    stock: Callable[[Rope, Params], RopeParameters] | None
    ours: Callable[[Rope, Params], "torch.Tensor"] | None = None
    params: Params = field(default_factory=dict)
    log_coef: float = 0.0
    heals: bool = False


# --- tables that transformers computes -------------------------------------------------------------------------------


def _rope(rope: Rope, params: Params) -> RopeParameters:
    block = {"rope_type": rope.rope_type, "rope_theta": rope.rope_theta, **rope.scaling}
    if params.get("table") is None:
        return block
    factors = rope.scaling[f"{params['table']}_factor"]  # one of the parent's two tables, at every length
    return block | {"short_factor": factors, "long_factor": factors}


def _pi(rope: Rope, params: Params) -> RopeParameters:
    return {"rope_type": "linear", "rope_theta": rope.rope_theta, "factor": params["factor"], **_partial(rope)}


def _ntk(rope: Rope, params: Params) -> RopeParameters:
    """NTK-aware: base * factor^(R/(R-2)), one fixed table (transformers' `dynamic` at factor times the window)."""
    base = rope.rope_theta * params["factor"] ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return {"rope_type": "default", "rope_theta": base, **_partial(rope)}


def _yarn(rope: Rope, params: Params) -> RopeParameters:
    return {
        "rope_type": "yarn",
        "rope_theta": rope.rope_theta,
        "factor": params["factor"],
        "original_max_position_embeddings": rope.window,
        **{k: params[k] for k in ("beta_fast", "beta_slow", "attention_factor") if params[k] is not None},
        **_partial(rope),
    }


def _llama3(rope: Rope, params: Params) -> RopeParameters:
    slowest = 2 * math.pi * rope.rope_theta ** (1 - 2 / rope.rotary_dim)  # tokens a turn
    least = rope.window / params["high_freq_factor"]
    if slowest < least:
        raise OptionError(
            f"llama3 stretches pairs that take more than window/high_freq_factor = {least:g} tokens a turn, and the "
            f"slowest here takes {slowest:.0f}, so nothing would change: choose another method"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": rope.rope_theta,
        "factor": params["factor"],
        "low_freq_factor": params["low_freq_factor"],
        "high_freq_factor": params["high_freq_factor"],
        "original_max_position_embeddings": rope.window,
        **_partial(rope),
    }


def _longrope(rope: Rope, params: Params) -> RopeParameters:
    factors = params["long_factor"]
    if not isinstance(factors, list | tuple) or len(factors) != rope.pairs:
        raise OptionError(
            f"longrope needs long_factor, a list of {rope.pairs} numbers, one a channel pair: "
            "--set long_factor=FILE.json"
        )
    return {
        "rope_type": "longrope",
        "rope_theta": rope.rope_theta,
        "factor": params["factor"],
        "long_factor": list(factors),
        "short_factor": list(params["short_factor"] or factors),
        "original_max_position_embeddings": rope.window,
        **({} if params["attention_factor"] is None else {"attention_factor": params["attention_factor"]}),
        **_partial(rope),
    }


def _partial(rope: Rope) -> RopeParameters:
    if "partial_rotary_factor" in rope.scaling and rope.rope_type != "proportional":
        return {"partial_rotary_factor": rope.scaling["partial_rotary_factor"]}
    return {}


# --- our own tables, which transformers' `proportional` type can spell -----------------------------------------------


def _ladder(rungs: int, window: int) -> "torch.Tensor":
    """RoPE-ID's geometric ladder [rungs]: from 2 pi / 32 down to 2 * 2 pi / window (ICLR 2026)."""
    import torch

    first, last = 2 * math.pi / 32, 4 * math.pi / window
    steps = torch.arange(rungs, dtype=torch.float64) / max(rungs - 1, 1)
    return (first * (last / first) ** steps).float()


def _ladder_stock(rope: Rope, rungs: int, window: int) -> RopeParameters:
    """`proportional` gives base^(-2f/D)/factor: with these three numbers, the ladder's rungs."""
    if _code_slices(rope):
        return longrope_block(_zeros_after(_ladder(rungs, window), rope.pairs), rope)
    base = (window / 64) ** (rope.head_dim / max(2 * rungs - 2, 1))
    return _proportional(rope, rungs, base) | {"factor": 32 / (2 * math.pi)}


def _first_pairs_stock(rope: Rope, kept: int) -> RopeParameters:
    """The first `kept` pairs as they are, the rest at rest."""
    if _code_slices(rope):
        return longrope_block(_zeros_after(_base_table(rope)[:kept], rope.pairs), rope)
    return _proportional(rope, kept, rope.rope_theta)


def _code_slices(rope: Rope) -> bool:
    """Does the modeling code cut the turning channels out by partial_rotary_factor? Then `proportional`, which has
    another use for that number, cannot be said to it, and longrope factors say the same."""
    return rope.family.partial is not None or rope.rotary_dim != rope.head_dim


def _proportional(rope: Rope, rungs: int, base: float) -> RopeParameters:
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": 2 * rungs / rope.head_dim}


def longrope_block(
    theta: "torch.Tensor", rope: Rope, attention_factor: float = 1.0, factor: float = 1.0
) -> RopeParameters:
    """Any table [F] as longrope factors: base^(-2f/R) / factor = theta; a pair at rest gets a huge factor.

    Each factor is the float32 whose table entry is nearest to theta, so the stock model turns by the same angles.
    """
    import torch

    powers = _powers(rope.rope_theta, rope.rotary_dim)
    guess = torch.where(theta > 0, 1.0 / (theta * powers), 1e30)
    up, down = guess.nextafter(guess + torch.inf), guess.nextafter(guess - torch.inf)
    candidates = torch.stack((guess, up, down, up.nextafter(up + torch.inf), down.nextafter(down - torch.inf)))
    error = (1.0 / (candidates * powers) - theta).abs()
    factors = candidates.gather(0, error.argmin(0, keepdim=True))[0].tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": rope.rope_theta,
        "factor": max(factor, 1.0),
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": rope.window,
        **_partial(rope),
    }


def _zeros_after(table: "torch.Tensor", pairs: int) -> "torch.Tensor":
    import torch

    return torch.cat((table, torch.zeros(pairs - len(table))))


def _base_table(rope: Rope) -> "torch.Tensor":
    """base^(-2f/R) [F]."""
    return 1.0 / _powers(rope.rope_theta, rope.rotary_dim)


def _powers(base: float, rotary_dim: int) -> "torch.Tensor":
    """base^(2f/R) [F]."""
    import torch

    return base ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def _train_length(rope: Rope, params: Params) -> int:
    length = int(params["train_length"] or rope.window)
    if length <= 64:
        raise OptionError(
            f"train_length is {length}: the rope-id ladder descends from a wavelength of 32 to half of "
            "train_length, so it must be above 64"
        )
    return length


def _half(rope: Rope) -> int:
    """Pairs in half of the head's channels: the faster half of the pairs, in frequency order."""
    return rope.pairs // 2


def _kept(rope: Rope, fraction: float) -> int:
    if not 0 <= fraction < 1:
        raise OptionError(f"fraction is {fraction:g}: give a number from 0 to below 1, where nothing would change")
    return int(rope.pairs * fraction)


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("rope", "the checkpoint's own table, as it is", _rope, params={"table": None}),
        Method("pi", "position interpolation: every frequency divided by factor", _pi),
        Method("ntk", "NTK-aware: a larger base, so slow pairs stretch most", _ntk),
        Method(
            "yarn",
            "YaRN: slow pairs interpolated, fast ones kept, logits sharpened",
            _yarn,
            params={"beta_fast": None, "beta_slow": None, "attention_factor": None},
        ),
        Method(
            "llama3",
            "Llama 3.1's smooth interpolation of the slow pairs",
            _llama3,
            params={"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        Method(
            "longrope",
            "one given factor a pair (LongRoPE)",
            _longrope,
            params={"long_factor": None, "short_factor": None, "attention_factor": None},
        ),
        Method(
            "adarope",
            "AdaRoPE: frequencies per key/value head and a length-dependent scale per query head, learned",
            None,
        ),
        Method(
            "rope-id",
            "RoPE-ID: half of the channels rotate fast, half not at all; needs healing by training",
            lambda rope, p: _ladder_stock(rope, _half(rope), _train_length(rope, p)),
            lambda rope, p: _zeros_after(_ladder(_half(rope), _train_length(rope, p)), rope.pairs),
            params={"train_length": None},
            log_coef=0.1,
            heals=True,
        ),
        Method(
            "half-rope",
            "the faster half of the pairs as they are, the slower half not rotated",
            lambda rope, p: _first_pairs_stock(rope, _half(rope)),
            lambda rope, p: _zeros_after(_base_table(rope)[: _half(rope)], rope.pairs),
            heals=True,
        ),
        Method(
            "high-freq",
            "every pair on RoPE-ID's ladder of fast rotations",
            lambda rope, p: _ladder_stock(rope, rope.pairs, _train_length(rope, p)),
            lambda rope, p: _ladder(rope.pairs, _train_length(rope, p)),
            params={"train_length": None},
            log_coef=0.1,
            heals=True,
        ),
        Method(
            "nope",
            "no rotation at all",
            lambda rope, p: _first_pairs_stock(rope, 0),
            lambda rope, p: _zeros_after(_base_table(rope)[:0], rope.pairs),
            heals=True,
        ),
        Method(
            "p-rope",
            "a top fraction of the pairs as they are, the rest not rotated",
            lambda rope, p: _first_pairs_stock(rope, _kept(rope, p["fraction"])),
            lambda rope, p: _zeros_after(_base_table(rope)[: _kept(rope, p["fraction"])], rope.pairs),
            params={"fraction": 0.75},
            heals=True,
        ),
    )
}


def method(name: str) -> Method:
    """The registry entry, or an error that lists the names."""
    try:
        return METHODS[name]
    except KeyError:
        raise OptionError(f"unknown method '{name}': choose one of {', '.join(METHODS)}") from None


def resolve_params(name: str, rope: Rope, factor: float, given: Params) -> dict[str, Any]:
    """Defaults, overridden by what the user gave; a key that the method does not have is an error."""
    known = method(name).params
    for key in given:
        if key not in known:
            names = ", ".join(known) or "none"
            raise OptionError(f"'{name}' has no parameter '{key}' (it has: {names})")
        if key != "table" and not isinstance(given[key], int | float | list | tuple | None):
            raise OptionError(f"{key} is {given[key]!r}: give a number, or a .json file with a list of them")
    if factor < 1 or not math.isfinite(factor):
        raise OptionError(f"factor is {factor:g}: an extension has a factor of 1 or more")
    if name != "rope" and rope.rope_type not in ("default", "yarn"):
        raise OptionError(
            f"the checkpoint was trained with rope type '{rope.rope_type}', and '{name}' would discard that: "
            "only adarope that starts from it (--init rope) keeps its table"
        )
    resolved = {"factor": factor, **known, **given}
    if resolved.get("table") is not None and (not two_lengths(rope) or resolved["table"] not in ("short", "long")):
        raise OptionError("table is short or long, for a longrope checkpoint that has two: leave --set table out")
    return resolved


def two_lengths(rope: Rope) -> bool:
    """Does the checkpoint change between two longrope tables with the length of its input?"""
    return rope.rope_type == "longrope" and rope.scaling["short_factor"] != rope.scaling["long_factor"]


def stock_block(name: str, rope: Rope, params: Params) -> RopeParameters | None:
    """The rope_parameters block by which a stock config states the method; None where none can."""
    stock = method(name).stock
    if stock is None:
        return None
    block = stock(rope, params)
    if name != "rope" and rope.family.longrope_only and block["rope_type"] not in ("default", "longrope"):
        found = stock_table(rope, block)
        return longrope_block(found.theta, rope, found.attention_factor, params["factor"])
    return block


def table(name: str, rope: Rope, params: Params) -> Table:
    """The method's table for this checkpoint. `params` come from resolve_params."""
    entry = method(name)
    if entry.ours is not None:
        return Table(entry.ours(rope, params), log_coef=entry.log_coef)
    if entry.stock is None:
        raise OptionError(f"'{name}' has no table of its own: it starts from another method's (--init)")
    return stock_table(rope, entry.stock(rope, params))


def stock_table(rope: Rope, rope_parameters: RopeParameters) -> Table:
    """What transformers itself computes from a rope_parameters block, for the longest context of that block."""
    import torch

    rope_type = rope_parameters["rope_type"]
    if rope_type == "default":
        return Table(1.0 / _powers(rope_parameters["rope_theta"], rope.rotary_dim))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise OptionError(f"rope type '{rope_type}' is not one that transformers knows")

    class Carrier(RotaryEmbeddingConfigMixin):  # what the functions read of a config, without a model's own
        hidden_size = head_dim = rope.head_dim
        num_attention_heads = 1
        max_position_embeddings = rope.max_position_embeddings

    carrier: Any = Carrier()
    carrier.rope_parameters = dict(rope_parameters)
    # longrope keeps a short table for windows it never left; an extension uses the long one at every length.
    longest = rope.max_position_embeddings + 1 if rope_type == "longrope" else None
    theta, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](carrier, torch.device("cpu"), seq_len=longest)
    return Table(theta.float(), float(attention_factor))
