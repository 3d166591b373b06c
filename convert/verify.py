"""verify: is a checkpoint on the disk what its index, its config and its manifest say?"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ropex.checkpoint import Checkpoint, is_run, locate, open_checkpoint
from ropex.config import ADAROPE, Rope, read_json
from ropex.convert.heads import head_of
from ropex.convert.output import PROVENANCE
from ropex.convert.plan import require_finite
from ropex.convert.shards import is_finite, sha256
from ropex.convert.source import is_rotary
from ropex.errors import CheckpointError, UnsupportedError


def verify(path: str | Path, progress: Callable[[str, int, int], None] | None = None) -> dict[str, Any]:
    """Read a folder again and compare: shards with index, shapes and dtypes with config.json, q, k and rotary tensors
    with finite numbers, every file with size and SHA-256 in the manifest that convert and export write.

    Returns {"path", "tensors", "files", "hashed", "notes"}. The first thing that is wrong is a CheckpointError.
    """
    folder = locate(path)
    if is_run(folder):
        raise UnsupportedError(f"{path} is a run, which checks its own hashes: write it by `ropex export`, verify that")
    if folder.is_file():
        raise UnsupportedError(f"{path} is a file: give the folder that `ropex export --format gguf` wrote")
    if (folder / PROVENANCE).exists() and not (folder / "config.json").exists():  # GGUF: one file, hashed
        notes: list[str] = []
        files, hashed = _files(folder, notes, progress or (lambda what, done, total: None))
        return {"path": str(folder), "tensors": 0, "files": files, "hashed": hashed, "notes": notes}
    checkpoint = open_checkpoint(folder)
    rope = checkpoint.rope
    for fault in _shapes(checkpoint, rope):
        raise CheckpointError(f"{folder}: {fault}")
    require_finite(checkpoint, rope)
    for name, info in checkpoint.tensors.items():
        if is_rotary(name) and not is_finite(info):
            raise CheckpointError(f"{folder}: {name} has values that are not finite numbers: it is damaged")
    notes = [f"{name} is not in the index" for name in checkpoint.stray]
    files, hashed = _files(folder, notes, progress or (lambda what, done, total: None))
    return {"path": str(folder), "tensors": len(checkpoint.tensors), "files": files, "hashed": hashed, "notes": notes}


def _files(folder: Path, notes: list[str], say: Callable[[str, int, int], None]) -> tuple[int, int]:
    """Compare the files with the manifest; how many there are, and how many of them were hashed."""
    if not (folder / PROVENANCE).exists():
        notes.append(f"there is no {PROVENANCE} with hashes to compare: the content of the weights was not checked")
        return 0, 0
    listed = read_json(folder / PROVENANCE).get("files", {})
    hashed = 0
    for done, (name, entry) in enumerate(listed.items()):
        say(f"hashing {name}", done, len(listed))
        file = folder / name
        if not file.exists():
            raise CheckpointError(f"{folder} lacks {name}, which {PROVENANCE} lists: it is incomplete")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, and was written with {entry['bytes']}")
        if entry["sha256"] is None:
            notes.append(f"{name} was linked without being read: there is no hash to compare")
        elif sha256(file) != entry["sha256"]:
            raise CheckpointError(f"{file} is not what was written: its SHA-256 differs. It was changed or is damaged")
        else:
            hashed += 1
    return len(listed), hashed


def _shapes(checkpoint: Checkpoint, rope: Rope) -> Iterator[str]:
    """What in the headers contradicts the config."""
    config, family, d = checkpoint.config, rope.family, rope.head_dim
    q, kv = rope.heads * d, rope.kv_heads * d
    rows = {"q": 2 * q if family.gated else q, "k": kv, "qkv": q + 2 * kv}
    attention = {*rope.turning, *(rope.local.turning if rope.local else ())}
    seen: dict[int, set[str]] = {layer: set() for layer in attention}
    for name, info in checkpoint.tensors.items():
        head = head_of(name, family)
        if head is not None:
            seen.setdefault(head.layer, set()).add(head.part)
            if head.layer >= rope.layers:
                yield f"{name} belongs to a layer beyond the {rope.layers} of config.json"
            if head.part.endswith("norm"):
                if info.size % d:
                    yield f"{name} has shape {list(info.shape)}, which is no norm over heads of {d} channels"
            elif head.inner in ("weight", "bias") and info.shape[0] != rows[head.part]:
                yield f"{name} has {info.shape[0]} rows where config.json's heads make {rows[head.part]}"
        if name.endswith(("embed_tokens.weight", "embed_in.weight")) and info.shape[0] != config.get("vocab_size"):
            yield f"{name} has {info.shape[0]} rows where config.json says vocab_size {config.get('vocab_size')}"
    for layer, parts in seen.items():
        if not parts & {"q", "qkv"} or not parts & {"k", "qkv"}:
            yield f"layer {layer} lacks its query or key projection"
    said = config.get("dtype") or config.get("torch_dtype")
    if said is not None and str(said).removeprefix("torch.") != checkpoint.dtype:
        yield f"config.json says {said} and the tensors are {checkpoint.dtype}"
    yield from _rotary_shapes(checkpoint, rope)


def _rotary_shapes(checkpoint: Checkpoint, rope: Rope) -> Iterator[str]:
    spec = checkpoint.spec
    stored = {name: info for name, info in checkpoint.tensors.items() if is_rotary(name)}
    if spec is None:
        if stored:
            yield f"{next(iter(stored))} is there, and config.json has no '{ADAROPE}' block"
        return
    queries, kvs = (1, 1) if spec.shared else (rope.heads, rope.kv_heads)
    shapes = {"theta0": (rope.pairs,), "delta": (kvs, rope.pairs), "tau": (queries,), "gamma": (queries,)}
    for layer in spec.layers(rope):
        for kind, shape in shapes.items():
            name = f"{rope.family.layer.format(layer)}.{ADAROPE}.{kind}"
            info = stored.pop(name, None)
            if info is None:
                yield f"the rotary tensor {name} is missing"
            elif (info.shape, info.dtype) != (shape, "F32"):
                yield f"{name} is {info.dtype} {list(info.shape)} where F32 {list(shape)} belongs"
    if stored:
        yield f"{next(iter(stored))} is a rotary tensor that config.json does not know"
