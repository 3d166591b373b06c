"""Writing safetensors shards from a stream of tensors: no more than HELD bytes of them are in memory."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ropex.checkpoint import INDEX, SINGLE, TensorInfo
from ropex.convert.shards import serialised_header

if TYPE_CHECKING:
    import numpy as np
    import torch

HELD = 64 << 20  # bytes of tensors kept before they go to the disk
ROOM = 256 << 10  # bytes left in front for the header of a shard that outgrew them


def reorder(tensor: "torch.Tensor", index: "np.ndarray") -> "torch.Tensor":
    """The tensor with its rows in the order of an index from `row_index`."""
    import torch

    return tensor.reshape(len(index), -1)[torch.from_numpy(index)].reshape(tensor.shape)


_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip


def dtype_name(dtype: "torch.dtype") -> str:
    """A torch dtype as safetensors spells it."""
    return _NAMES[str(dtype).removeprefix("torch.")]


class _Shard:
    """A shard that grows: in memory up to HELD bytes, then on the disk behind the room that its header will take."""

    def __init__(self, path: Path, metadata: dict[str, str]) -> None:
        self.path, self.metadata = path, metadata
        self.infos: dict[str, TensorInfo] = {}
        self.bytes = self.header_bytes = 0
        self._waiting: list[torch.Tensor] = []
        self._waiting_bytes = 0
        self._file: BinaryIO | None = None

    def add(self, name: str, tensor: "torch.Tensor") -> None:
        size = tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        self.infos[name] = TensorInfo(self.path, dtype_name(tensor.dtype), shape, self.bytes, self.bytes + size)
        self.bytes += size
        self.header_bytes += len(name.encode()) + 8 * len(shape) + 120  # at most, with offsets of 16 digits
        self._waiting.append(tensor.contiguous())
        self._waiting_bytes += size
        if self._waiting_bytes > HELD:
            self._spill()

    def _spill(self) -> None:
        import torch

        if self._file is None:
            self._file = self.path.open("wb")
            self._file.write(b" " * ROOM)
        for tensor in self._waiting:
            self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._waiting, self._waiting_bytes = [], 0

    def close(self) -> None:
        import torch

        header = serialised_header(self.infos, self.metadata)
        if self._file is None:
            with self.path.open("wb") as file:
                file.write(header)
                for tensor in self._waiting:
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            return
        self._spill()
        self._file.seek(0)
        self._file.write(struct.pack("<Q", ROOM - 8) + header[8:].ljust(ROOM - 8))
        self._file.close()


def write_shard(path: Path, tensors: "dict[str, torch.Tensor]", metadata: dict[str, str]) -> None:
    """Write one file of tensors."""
    shard = _Shard(path, metadata)
    for name, tensor in tensors.items():
        shard.add(name, tensor)
    shard.close()


def write_shards(
    tensors: Iterable[tuple[str, "torch.Tensor"]], folder: Path, max_bytes: int, metadata: dict[str, str]
) -> None:
    """Write a stream of (name, tensor) as model.safetensors, or as shards of at most max_bytes with an index."""
    metadata = metadata | {"format": "pt"}
    room = ROOM - len(json.dumps(metadata).encode()) - 64
    shards = [_Shard(folder / "1.part", metadata)]
    for name, tensor in tensors:
        now, size = shards[-1], tensor.numel() * tensor.element_size()
        if now.infos and (now.bytes + size > max_bytes or now.header_bytes > room - 1024):
            now.close()
            shards.append(_Shard(folder / f"{len(shards) + 1}.part", metadata))
        shards[-1].add(name, tensor)
    shards[-1].close()
    if len(shards) == 1:
        shards[0].path.rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.path.rename(folder / name)
        weight_map |= dict.fromkeys(shard.infos, name)
    write_index(folder, weight_map, sum(shard.bytes for shard in shards))


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
