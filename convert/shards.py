"""Safetensors shards on the disk: whole files and spans copied by the kernel, rows of q and k reordered on the way.

No tensor is decoded, so nothing here needs torch, and no more than one reordered tensor is in memory.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ropex.checkpoint import TensorInfo

CHUNK = 8 << 20  # bytes read at once


@dataclass(frozen=True)
class Shard:
    """One shard to write: where from, under which name, what of it, and whose rows move.

    header: the tensors that are kept, in file order; metadata: of the new header. whole: nothing in it changes, so
    the file is copied or linked as it is. reordered: row indices by tensor name.
    """

    source: Path
    name: str
    header: dict[str, TensorInfo]
    metadata: dict[str, str]
    whole: bool
    reordered: dict[str, np.ndarray]

    @property
    def bytes(self) -> int:
        return self.source.stat().st_size if self.whole else sum(t.end - t.start for t in self.header.values())


def write(shard: Shard, folder: Path, link: bool) -> bool:
    """Write the shard into `folder`; True where it became a link to the source."""
    target = folder / shard.name
    if shard.whole and link:
        try:
            os.link(shard.source.resolve(), target)  # resolved: a hub snapshot is links already
            return True
        except OSError:  # another disk, or one without links
            pass
    with shard.source.open("rb") as source, target.open("wb") as out:
        if shard.whole:
            copy_span(source, out, 0, shard.source.stat().st_size)
        else:
            out.write(serialised_header(shard.header, shard.metadata))
            for names, start, end in _spans(shard):
                if names is None:
                    copy_span(source, out, start, end - start)
                else:
                    out.write(_reordered(os.pread(source.fileno(), end - start, start), shard.reordered[names]))
    return False


def _reordered(raw: bytes, index: np.ndarray) -> bytes:
    return np.frombuffer(raw, np.uint8).reshape(len(index), -1)[index].tobytes()


def _spans(shard: Shard) -> Iterator[tuple[str | None, int, int]]:
    """(name, start, end) of each reordered tensor, and (None, start, end) of what lies between, joined."""
    first = last = -1
    for name, info in shard.header.items():
        if name not in shard.reordered and info.start == last:
            last = info.end
            continue
        if last > first:
            yield None, first, last
        if name in shard.reordered:
            yield name, info.start, info.end
            first = last = -1
        else:
            first, last = info.start, info.end
    if last > first:
        yield None, first, last


def serialised_header(tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> bytes:
    """The start of a safetensors file that holds these tensors one after the other."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, info in tensors.items():
        size = info.end - info.start
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def copy_span(source: BinaryIO, out: BinaryIO, start: int, count: int) -> None:
    """Append `count` bytes of source, from byte `start` on, to out: inside the kernel where the system can."""
    out.flush()
    done = 0
    while done < count:
        try:
            moved = os.copy_file_range(source.fileno(), out.fileno(), min(count - done, 1 << 30), start + done)
        except (OSError, AttributeError):  # between disks of old kernels, or not Linux
            break
        if moved == 0:
            break
        done += moved
    out.seek(0, os.SEEK_END)
    while done < count:
        block = os.pread(source.fileno(), min(CHUNK, count - done), start + done)
        if not block:
            raise OSError(f"{source.name} ended {count - done} bytes early: it changed while it was read")
        out.write(block)
        done += len(block)
    out.flush()


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(CHUNK):
            found.update(block)
    return found.hexdigest()


def read_floats(info: TensorInfo) -> np.ndarray | None:
    """The tensor in float32 or wider; None for dtypes that are no 16- to 64-bit floats."""
    with info.file.open("rb") as file:
        raw = os.pread(file.fileno(), info.end - info.start, info.start)
    if info.dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
    if info.dtype not in kinds:
        return None
    return (
        np.frombuffer(raw, kinds[info.dtype])
        .astype(np.float64 if info.dtype == "F64" else np.float32)
        .reshape(info.shape)
    )


_EXPONENTS = {"F64": (np.uint64, 0x7FF << 52), "F32": (np.uint32, 0xFF << 23), "F16": (np.uint16, 0x1F << 10),
              "BF16": (np.uint16, 0xFF << 7)}  # fmt: skip


def is_finite(info: TensorInfo) -> bool:
    """No NaN and no infinity: an exponent of all ones. Other dtypes than 16- to 64-bit floats pass unread."""
    if info.dtype not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[info.dtype]
    mask = np.asarray(exponent, kind)
    with info.file.open("rb") as file:
        for start in range(info.start, info.end, CHUNK):
            block = np.frombuffer(os.pread(file.fileno(), min(CHUNK, info.end - start), start), kind)
            if ((block & mask) == mask).any():
                return False
    return True
