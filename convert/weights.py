"""Writing safetensors shards from a stream of tensors: no more than one shard is in memory."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ropex.checkpoint import INDEX, SINGLE

if TYPE_CHECKING:
    import torch


def write_shards(
    tensors: Iterable[tuple[str, "torch.Tensor"]], folder: Path, max_bytes: int, metadata: dict[str, str]
) -> None:
    """Write a stream of (name, tensor) as model.safetensors, or as shards of at most max_bytes with an index."""
    from safetensors.torch import save_file

    metadata = metadata | {"format": "pt"}
    weight_map: dict[str, int] = {}
    total = shards = held = 0
    batch: dict[str, torch.Tensor] = {}

    def flush() -> None:
        nonlocal batch, held, shards
        shards += 1
        save_file(batch, folder / f"{shards}.part", metadata)
        batch, held = {}, 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if batch and held + size > max_bytes:
            flush()
        batch[name] = tensor.contiguous()
        weight_map[name] = shards + 1
        held, total = held + size, total + size
    flush()
    if shards == 1:
        (folder / "1.part").rename(folder / SINGLE)
        return
    names = {i: f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)}
    for i, name in names.items():
        (folder / f"{i}.part").rename(folder / name)
    write_index(folder, {tensor: names[i] for tensor, i in weight_map.items()}, total)


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
