"""inspect: what a checkpoint is, from its headers alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ropex.checkpoint import (
    RUN,
    TRAINED,
    Checkpoint,
    TensorInfo,
    is_gguf,
    is_meta,
    is_pickled,
    is_run,
    locate,
    open_checkpoint,
    read_header,
    run_source,
)
from ropex.config import ADAROPE, Rope, read_json, rope_of
from ropex.convert.heads import head_of, rows_by_head
from ropex.convert.shards import read_floats
from ropex.convert.source import every, is_rotary, open_source
from ropex.errors import UnsupportedError
from ropex.spec import method_name
from ropex.tables import METHODS, two_lengths


def inspect(path: str | Path) -> dict[str, Any]:
    """Facts about a folder, a GGUF file or a run. Reads headers only (and each head's scale), imports no torch for a
    folder.

    Keys: family, layers, heads, kv_heads, head_dim, rotary_dim, pairing, method, rope_theta, window (tokens the model
    was trained for), dtype, parameters; beside them turning (the layers that rotate), local (the second table of
    sliding layers, if any), pair_offset (channels between the two of a pair), norms, scale (tau and gamma by head,
    where converted), rope (type and parameters), claims (max_position_embeddings),
    tied, shards, tensors, adds ({method: parameters a conversion would add}), notes, and spec where converted.
    """
    found = locate(path)
    if is_run(found):
        run = read_json(found / RUN)
        facts = inspect(run_source(found))
        return facts | {
            "method": run["spec"]["method"],
            "spec": run["spec"],
            "run": str(found),
            "claims": run["spec"]["target"],
            "adds": {},
            "scale": scales(read_header(found / TRAINED)[0]) if (found / TRAINED).exists() else [],
        }
    if is_gguf(found):
        from ropex.convert.read_gguf import gguf_header

        header = gguf_header(found)
        return _facts(header.config, header.pairing, header.dtype, header.parameters) | {
            "shards": [found.name],
            "tensors": len(header.tensors),
            "notes": ["q and k rows are permuted to half-split when it is read"] * (header.pairing == "interleaved"),
        }
    if is_meta(found) or is_pickled(found):
        return _pickled_facts(found)
    return _folder_facts(open_checkpoint(found))


def _pickled_facts(path: Path) -> dict[str, Any]:
    """Of weights in PyTorch's own files, which have no header that could be read alone."""
    source = open_source(path)
    tensors = [(tensor.dtype, tensor.numel()) for _, tensor in source.tensors(every)]
    dtypes = Counter[str]()
    for dtype, size in tensors:
        dtypes[str(dtype).removeprefix("torch.")] += size
    pairing = "interleaved" if is_meta(path) else rope_of(source.config).pairing
    facts = _facts(source.config, pairing, dtypes.most_common(1)[0][0], dtypes.total())
    moves = ["q and k rows are permuted to half-split when it is read"] * is_meta(path)
    return facts | {
        "shards": sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pth")),
        "tensors": len(tensors),
        "notes": facts["notes"] + source.notes + moves,
    }


def _folder_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    rope = checkpoint.rope
    spec = checkpoint.spec
    facts = _facts(checkpoint.config, rope.pairing, checkpoint.dtype, checkpoint.parameters)
    notes = facts["notes"] + [f"{name} is not in the index and is left aside" for name in checkpoint.stray]
    rotary = {name: info for name, info in checkpoint.tensors.items() if is_rotary(name)}
    if spec is not None and not rotary:
        notes.append("the config announces rotary tensors, and there are none: it will not load")
    if facts["tied"] and "lm_head.weight" in checkpoint.tensors:
        notes.append("lm_head.weight is stored although the config ties it to the embeddings: it is carried along")
    return facts | {
        "norms": _norms(checkpoint, rope),
        "shards": [file.name for file in checkpoint.shards],
        "tensors": len(checkpoint.tensors),
        "notes": notes,
        **({"spec": spec.block(), "scale": scales(rotary)} if spec else {}),
    }


def _norms(checkpoint: Checkpoint, rope: Rope) -> str | None:
    """What the norms between projection and rotation span, by the shape of their weights."""
    for name, info in checkpoint.tensors.items():
        head = head_of(name, rope.family)
        if head is not None and head.part == "q norm":
            if info.size == rope.head_dim:
                return (
                    "one weight for a head's channels, shared by all heads" if "norms." not in name else "a head each"
                )
            return "across all heads" if len(info.shape) == 1 else "a head each"
    return None


def head_norms(path: str | Path) -> list[dict[str, Any]]:
    """Frobenius norms of every head's query and key rows: [{"layer", "q": [Hq], "k": [Hkv]}]. Reads these projections,
    one at a time, wherever they lie, fused or not; a head that was torn apart stands out."""
    checkpoint = open_checkpoint(path)
    rope = checkpoint.rope
    layers: dict[int, dict[str, Any]] = {}
    for name, info in checkpoint.tensors.items():
        head = head_of(name, rope.family)
        if head is None or head.inner != "weight" or head.part.endswith("norm"):
            continue
        weight = read_floats(info)
        if weight is None:
            raise UnsupportedError(f"{name} is {info.dtype}: norms are taken of 16- to 64-bit floats")
        for part, rows in rows_by_head(head.part, rope).items():
            norms = np.sqrt(np.square(weight[rows], dtype=np.float64).sum((1, 2)))
            layers.setdefault(head.layer, {"layer": head.layer})[part] = norms.tolist()
    return [layers[layer] for layer in sorted(layers)]


def scales(rotary: dict[str, TensorInfo]) -> list[dict[str, Any]]:
    """tau and gamma of every head from a checkpoint's rotary tensors: [{"layer", "tau", "gamma"}], in layer order."""
    layers: dict[int, dict[str, Any]] = {}
    for name, info in rotary.items():
        prefix, _, kind = name.rpartition(".")
        if kind in ("tau", "gamma"):
            layer = int(prefix.split("layers.")[1].split(".")[0])
            with info.file.open("rb") as file:
                file.seek(info.start)
                values = np.frombuffer(file.read(info.end - info.start), np.float32).tolist()
            layers.setdefault(layer, {"layer": layer})[kind] = values
    return [layers[layer] for layer in sorted(layers)]


def _facts(config: dict[str, Any], pairing: str, dtype: str, parameters: int) -> dict[str, Any]:
    rope = rope_of(config)
    notes = []
    if two_lengths(rope):
        notes.append(
            f"two tables: the short one up to {rope.scaling['original_max_position_embeddings']} tokens, the long one "
            "above"
        )
    if len(rope.turning) < rope.layers and rope.local is None:
        notes.append(f"{len(rope.turning)} of {rope.layers} layers turn")
    return {
        "family": rope.family.model_type,
        "layers": rope.layers,
        "heads": rope.heads,
        "kv_heads": rope.kv_heads,
        "head_dim": rope.head_dim,
        "rotary_dim": rope.rotary_dim,
        "pairing": pairing,
        "method": method_name(config),
        "rope_theta": rope.rope_theta,
        "window": rope.window,
        "dtype": dtype,
        "parameters": parameters,
        "rope": {"type": rope.rope_type, **rope.scaling},
        "turning": list(rope.turning),
        "local": _local(rope.local, config) if rope.local else None,
        "pair_offset": 1 if pairing == "interleaved" else rope.pairs,
        "claims": rope.max_position_embeddings,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "adds": {} if ADAROPE in config else {name: added_parameters(name, rope) for name in METHODS if name != "rope"},
        "notes": notes,
    }


def _local(rope: Rope, config: dict[str, Any]) -> dict[str, Any]:
    """The second table, of the sliding-window layers."""
    return {
        "layers": list(rope.turning),
        "window": config.get("sliding_window"),
        "rope_theta": rope.rope_theta,
        "rope": {"type": rope.rope_type, **rope.scaling},
    }


def added_parameters(name: str, rope: Rope) -> int:
    """Trainable numbers that a conversion adds: delta [Hkv, F], tau and gamma [Hq] a layer for adarope."""
    return len(rope.turning) * (rope.kv_heads * rope.pairs + 2 * rope.heads) if name == ADAROPE else 0
