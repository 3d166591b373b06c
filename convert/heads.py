"""Which tensors of a checkpoint belong to queries and keys, and how their rows lie. Needs numpy alone."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from ropex.config import Rope
from ropex.errors import UnsupportedError
from ropex.families import Family, Pairing
from ropex.pairing import head_permutation, repeat_heads

Part = Literal["q", "k", "qkv", "q norm", "k norm"]
ROWS = re.compile(r"(weight|bias|lora_B(\.\w+)?\.weight|lora_magnitude_vector(\.\w+)*)")
INPUTS = re.compile(r"lora_A(\.\w+)?\.weight")  # its rows are the rank


@dataclass(frozen=True)
class Head:
    """A tensor of the query or key side: its layer, what it holds, and its name inside that module."""

    layer: int
    part: Part
    inner: str


@cache
def _pattern(family: Family) -> re.Pattern[str]:
    layer = re.escape(family.layer).replace(r"\{\}", r"(\d+)")
    return re.compile(rf"(?:^|\.){layer}\.([A-Za-z_]+)\.(.+)$")


@cache
def _parts(family: Family) -> dict[str, Part]:
    found: dict[str, Part] = {family.fused: "qkv"} if family.fused else {family.q_proj: "q", family.k_proj: "k"}
    if family.q_norm:
        found |= {family.q_norm: "q norm", family.k_norm: "k norm"}
    return found


def head_of(name: str, family: Family) -> Head | None:
    """What a tensor's name says it is; None for everything that rotation does not concern (v and o among it)."""
    match = _pattern(family).search(name)
    part = _parts(family).get(match[2]) if match else None
    return Head(int(match[1]), part, match[3]) if match and part else None


def row_index(name: str, shape: tuple[int, ...], dtype: str, rope: Rope, target: Pairing) -> np.ndarray | None:
    """How the rows of a tensor are reordered for the pairing `target`; None where they stay.

    The index counts the tensor's elements up to its last dimension ([rows, in]), or all of them for norms ([d],
    [n * d] or [n, d]). dtype: as safetensors spells it. Errors: UnsupportedError for what cannot be permuted, such as
    packed or block-quantised weights.
    """
    head = head_of(name, rope.family)
    turning = {*rope.turning, *(rope.local.turning if rope.local else ())}
    if head is None or head.layer not in turning or INPUTS.fullmatch(head.inner) or rope.pairing == target:
        return None
    one = head_permutation(rope.pairing, target, rope.head_dim, rope.rotary_dim)
    still = np.arange(rope.head_dim)
    norm = head.part.endswith("norm")
    if not norm and not ROWS.fullmatch(head.inner) or dtype not in ("F64", "F32", "F16", "BF16"):
        raise UnsupportedError(
            f"{name} ({dtype}) is quantised, and its rows cannot be permuted: start from the checkpoint in 16 bits"
        )
    if norm:
        elements = int(np.prod(shape))
        if elements % rope.head_dim:
            raise UnsupportedError(f"{name} has shape {list(shape)}, which is no norm over heads of {rope.head_dim}")
        return repeat_heads(one, elements // rope.head_dim)
    index = _rows(head.part, rope, one, still)
    if shape[0] != len(index):
        raise UnsupportedError(f"{name} has {shape[0]} rows where these heads make {len(index)}: it is packed")
    return index


def _rows(part: Part, rope: Rope, one: np.ndarray, still: np.ndarray) -> np.ndarray:
    """The index of all rows of a projection: `one` a query's or key's head, `still` a head that does not turn."""
    family = rope.family
    if part == "q":
        return repeat_heads(np.concatenate((one, rope.head_dim + still)) if family.gated else one, rope.heads)
    if part == "k":
        return repeat_heads(one, rope.kv_heads)
    if family.order == "per head":
        d = rope.head_dim
        return repeat_heads(np.concatenate((one, d + one, 2 * d + still)), rope.heads)
    q, k, v = repeat_heads(one, rope.heads), repeat_heads(one, rope.kv_heads), repeat_heads(still, rope.kv_heads)
    return np.concatenate((q, len(q) + k, len(q) + len(k) + v))


def rows_by_head(part: Part, rope: Rope) -> dict[str, np.ndarray]:
    """Row numbers of a projection's heads: {"q": [Hq, D], "k": [Hkv, D]}, whichever it holds."""
    d, q, kv = rope.head_dim, rope.heads * rope.head_dim, rope.kv_heads * rope.head_dim
    if part == "q":
        return {"q": np.arange(2 * q if rope.family.gated else q).reshape(rope.heads, -1)[:, :d]}
    if part == "k":
        return {"k": np.arange(kv).reshape(-1, d)}
    if rope.family.order == "per head":
        rows = np.arange(3 * q).reshape(-1, 3, d)
        return {"q": rows[:, 0], "k": rows[:, 1]}
    return {"q": np.arange(q).reshape(-1, d), "k": q + np.arange(kv).reshape(-1, d)}


def query_rows(name: str, shape: tuple[int, ...], rope: Rope) -> np.ndarray | None:
    """The rows [bool] of a projection's weight or bias that make queries; None for every other tensor."""
    head = head_of(name, rope.family)
    if head is None or head.part not in ("q", "qkv") or head.inner not in ("weight", "bias"):
        return None
    yes, no = np.ones(rope.head_dim, bool), np.zeros(rope.head_dim, bool)
    if head.part == "q":
        return np.tile(np.concatenate((yes, no)) if rope.family.gated else yes, rope.heads)
    if rope.family.order == "per head":
        return np.tile(np.concatenate((yes, no, no)), rope.heads)
    return np.arange(shape[0]) < rope.heads * rope.head_dim
