"""What a conversion of a safetensors folder will write, shard by shard, before anything is written."""

from collections import Counter
from typing import Any

import numpy as np

from ropex.checkpoint import INDEX, SINGLE, Checkpoint, TensorInfo, read_header
from ropex.config import Rope
from ropex.convert.heads import head_of, row_index
from ropex.convert.shards import Shard, is_finite
from ropex.convert.source import is_rotary
from ropex.errors import CheckpointError
from ropex.families import Pairing

ROTARY_SHARD = "model-adarope.safetensors"
WHOLE_SHARD = "model-00001-of-00001.safetensors"
INV_FREQ = "rotary_emb.inv_freq"


def plan_shards(checkpoint: Checkpoint, rope: Rope, target: Pairing, adds_shard: bool) -> list[Shard]:
    """The shards of the output. q and k are reordered for the pairing `target`; stale frequency buffers and, in a
    converted source, its rotary tensors (which get a shard of their own) are left out.

    adds_shard: a shard of rotary tensors will stand beside, so that a single file needs a shard's name.
    """
    single = not (checkpoint.path / INDEX).exists()
    names = {file: file.name for file in checkpoint.shards}
    if single:
        names = {file: WHOLE_SHARD if adds_shard else SINGLE for file in checkpoint.shards}
    _check_inv_freq(checkpoint, rope)
    shards = []
    for file, name in names.items():
        tensors, metadata = read_header(file)
        kept = {n: t for n, t in tensors.items() if not (n.endswith(INV_FREQ) or is_rotary(n))}
        kept = dict(sorted(kept.items(), key=lambda item: item[1].start))
        reordered: dict[str, np.ndarray] = {}
        for tensor, info in kept.items():
            index = row_index(tensor, info.shape, info.dtype, rope, target)
            if index is not None:
                reordered[tensor] = index
        whole = len(kept) == len(tensors) and not reordered and metadata.get("format") == "pt"
        if kept:
            shards.append(Shard(file, name, kept, metadata | {"format": "pt"}, whole, reordered))
    return shards


def _check_inv_freq(checkpoint: Checkpoint, rope: Rope) -> None:
    """Old checkpoints store their frequencies. Equal to the config's, to the buffer's precision, they are redundant;
    otherwise nobody can know which of the two the weights were trained with."""
    stored = [(n, t) for n, t in checkpoint.tensors.items() if n.endswith(INV_FREQ)]
    if not stored:
        return
    import torch
    from safetensors import safe_open

    from ropex.tables import table

    expected = table("rope", rope, {}).theta
    for name, info in stored:
        with safe_open(info.file, "pt") as shard:
            found = shard.get_tensor(name).float()
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=2e-2, atol=1e-7):
            raise CheckpointError(
                f"{info.file} stores frequencies in {name} that are not those of its config (rope_theta "
                f"{rope.rope_theta:g}): correct config.json, or delete the tensor"
            )


def require_finite(checkpoint: Checkpoint, rope: Rope) -> None:
    """A NaN or infinity in q or k spoils every logit behind it: refuse it by name."""
    for name, info in checkpoint.tensors.items():
        if head_of(name, rope.family) and not is_finite(info):
            raise CheckpointError(f"{checkpoint.path}: {name} has values that are not finite numbers: it is damaged")


def describe(shards: list[Shard], before: dict[str, Any], after: dict[str, Any], link: bool) -> dict[str, Any]:
    """The plan as a dry run shows it: {"shards", "reordered", "left_out", "bytes", "peak_memory", "config"}.

    bytes: to write. peak_memory: bytes beyond what the program itself takes: a reordered tensor is there twice.
    config: {key: [before, after]} of what changes.
    """
    sizes: list[int] = [s.header[n].end - s.header[n].start for s in shards for n in s.reordered]
    missing = object()
    return {
        "shards": [
            {
                "name": shard.name,
                "from": shard.source.name,
                "how": "rewritten" if not shard.whole else "linked" if link else "copied",
                "bytes": shard.bytes,
                "reordered": len(shard.reordered),
            }
            for shard in shards
        ],
        "reordered": dict(Counter(_kind(name) for shard in shards for name in shard.reordered)),
        "bytes": sum(shard.bytes for shard in shards if not (link and shard.whole)),
        "peak_memory": 2 * max(sizes, default=0),
        "config": {
            key: [before.get(key), after.get(key)]
            for key in [*before, *(k for k in after if k not in before)]
            if before.get(key, missing) != after.get(key, missing)
        },
    }


def _kind(name: str) -> str:
    """A tensor's name with * for the layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def weight_map(shards: list[Shard]) -> tuple[dict[str, str], int]:
    """The index's map of tensors to files, and the bytes of all tensors."""
    names = {name: shard.name for shard in shards for name in shard.header}
    infos: list[TensorInfo] = [info for shard in shards for info in shard.header.values()]
    return names, sum(info.end - info.start for info in infos)
