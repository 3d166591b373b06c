"""Checkpoints on disk: where they are, what their headers say, and whether that can be true. Needs no torch."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropex.config import ADAROPE, Rope, read_json, rope_of
from ropex.errors import CheckpointError, OptionError, UnsupportedError, first_line
from ropex.hub import fetch, looks_like_hub_id
from ropex.spec import RotarySpec, spec_of

if TYPE_CHECKING:
    from gguf import GGUFReader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
RUN, TRAINED = "run.json", "trained.safetensors"  # of a run of `ropex extend`: what it is, and what it trained
NANO = "nano"
_HEADER_LIMIT = 100 * 1024 * 1024  # safetensors' own limit on a header
_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its header states it: dtype in safetensors' spelling, and its byte span in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder, its headers read and checked against each other."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    stray: tuple[str, ...] = ()  # weight files in the folder that the index does not name

    @property
    def rope(self) -> Rope:
        return rope_of(self.config)

    @property
    def spec(self) -> RotarySpec | None:
        return spec_of(self.config)

    @property
    def shards(self) -> list[Path]:
        return sorted({t.file for t in self.tensors.values()})

    @property
    def parameters(self) -> int:
        """Of the model, tables and scales of converted heads not counted."""
        return sum(t.size for name, t in self.tensors.items() if f".{ADAROPE}." not in name)

    @property
    def dtype(self) -> str:
        """The dtype most parameters have, in torch's spelling."""
        totals: dict[str, int] = {}
        for t in self.tensors.values():
            totals[t.dtype] = totals.get(t.dtype, 0) + t.size
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
        top = max(totals, key=lambda d: totals[d])
        return names.get(top, top.lower())


def split_method(argument: str) -> tuple[str, str | None, float | None]:
    """`PATH@yarn:2` -> (PATH, "yarn", 2.0); a plain path has neither."""
    path, at, wish = argument.rpartition("@")
    if not at or "/" in wish or Path(argument).exists():
        return argument, None, None
    name, colon, factor = wish.partition(":")
    try:
        return path, name, float(factor) if colon else None
    except ValueError:
        raise OptionError(f"'{argument}': the factor after ':' is not a number; write PATH@yarn:2") from None


def locate(path: str | Path) -> Path:
    """The file or folder that an argument means. `nano` ships with ropex (a folder of that name is ./nano); `org/name`
    that is not here is looked for on the Hugging Face Hub."""
    if path == NANO:
        return Path(str(files("ropex.demo"))) / NANO
    found = Path(path).expanduser()
    if found.exists():
        return found
    if looks_like_hub_id(str(path)):
        return fetch(str(path))
    raise CheckpointError(f"{path} does not exist: give a checkpoint folder, a .gguf file, a Hub id, or 'nano'")


def is_gguf(path: Path) -> bool:
    return path.is_file() and path.suffix == ".gguf"


def is_meta(path: Path) -> bool:
    """True for Meta's own layout: params.json and consolidated.NN.pth."""
    return (path / "params.json").is_file() and any(path.glob("consolidated.*.pth"))


def is_pickled(path: Path) -> bool:
    """True for a Hugging Face folder with weights in PyTorch's own files alone."""
    return any(path.glob("pytorch_model*.bin")) and not any(path.glob("*.safetensors"))


def open_gguf(path: Path) -> "GGUFReader":
    """The parsed header, tensors mapped into memory. Errors: CheckpointError for what is no whole GGUF file."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UnsupportedError("GGUF files need the gguf package: pip install gguf sentencepiece") from None
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} is not a whole GGUF file ({first_line(error)}): download it again") from None
    if reader.byte_order != "I":
        raise UnsupportedError(f"{path} is written for machines of the other byte order: get one for this machine's")
    return reader


def is_run(path: Path) -> bool:
    """True for a folder that `ropex extend` wrote."""
    return (path / RUN).is_file()


def run_source(run: Path) -> Path:
    """The checkpoint that a run was trained on, and that its tensors belong to."""
    source = read_json(run / RUN)["source"]
    if source != NANO and not Path(source).exists():
        raise CheckpointError(
            f'{run} was trained on {source}, which is gone: put it back, or correct "source" in {run / RUN}'
        )
    return locate(source)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers of a folder and check them: every shard there and whole, every indexed tensor in its shard."""
    folder = locate(path)
    if is_meta(folder):
        raise CheckpointError(f"{path} is a folder of Meta's: make it one by `ropex convert {path} -o OUT --to rope`")
    if folder.is_file():
        raise CheckpointError(f"{path} is a file: give the checkpoint's folder (or a .gguf file)")
    config = read_json(folder / "config.json")
    index_path = folder / INDEX
    stray: tuple[str, ...] = ()
    if index_path.exists():
        tensors, metadata = _indexed(folder, read_json(index_path))
        named = {t.file.name for t in tensors.values()}
        stray = tuple(sorted(p.name for p in folder.glob("*.safetensors") if p.name not in named))
    elif (folder / SINGLE).exists():
        tensors, metadata = read_header(folder / SINGLE)
        stray = tuple(sorted(p.name for p in folder.glob("*.safetensors") if p.name != SINGLE))
    else:
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX}: it holds no safetensors weights. PyTorch's own files become "
            f"safetensors by `ropex convert {path} -o OUT --to rope`"
        )
    if not tensors:
        raise CheckpointError(f"{folder} holds no tensors: download it again")
    return Checkpoint(folder, config, tensors, metadata, stray)


def _indexed(folder: Path, index: dict[str, Any]) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of names to files: download it again")
    metadata: dict[str, str] = {}
    found: dict[str, TensorInfo] = {}
    for name in sorted(set(weight_map.values())):
        shard = folder / name
        if Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX} names the shard {name!r}, which lies outside the folder")
        if not shard.exists():
            raise CheckpointError(f"{folder / INDEX} names the shard {name}, which is missing: download it again")
        tensors, meta = read_header(shard)
        metadata |= meta
        for tensor, info in tensors.items():
            if weight_map.get(tensor) != name:
                said = weight_map.get(tensor)
                raise CheckpointError(
                    f"{shard} holds {tensor}, which the index {'puts into ' + said if said else 'does not name'}"
                )
            found[tensor] = info
    if lacking := sorted(set(weight_map) - set(found)):
        raise CheckpointError(f"the index names {lacking[0]} in {weight_map[lacking[0]]}, which does not hold it")
    return found, metadata


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of one safetensors file; reads the header alone and trusts nothing in it."""

    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is not a whole safetensors file: {why}")

    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head.startswith(b"version "):
            raise damaged("it is a git-lfs pointer; fetch the weights with `git lfs pull`")
        if len(head) < 8:
            raise damaged(f"it has {size} bytes; the download is incomplete")
        length = struct.unpack("<Q", head)[0]
        if length > _HEADER_LIMIT or 8 + length > size:
            raise damaged(f"its header claims {length} bytes; the download is incomplete or it is another format")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, UnicodeDecodeError) as error:
        raise damaged(f"its header is unreadable ({error})") from None
    if not isinstance(header, dict):
        raise damaged("its header is not an object")
    metadata = header.pop("__metadata__", None) or {}
    tensors: dict[str, TensorInfo] = {}
    data = size - 8 - length
    for name, entry in header.items():
        try:
            dtype, shape, (start, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
            start, end = int(start), int(end)
        except (KeyError, TypeError, ValueError):
            raise damaged(f"its entry for {name} is malformed") from None
        if dtype in _BYTES and prod(shape) * _BYTES[dtype] != end - start:
            raise damaged(f"{name} is {dtype} {list(shape)} but spans {end - start} bytes")
        if end > data:
            raise damaged(f"{name} ends at byte {end} of {data}; the download is incomplete")
        tensors[name] = TensorInfo(path, dtype, shape, 8 + length + start, 8 + length + end)
    spans = sorted((t.start, t.end) for t in tensors.values())
    for (_, before), (after, _) in zip(spans, spans[1:], strict=False):
        if after < before:
            raise damaged("its tensors overlap")
    if spans and spans[-1][1] != size:
        raise damaged(f"it has {size} bytes where its header accounts for {spans[-1][1]}")
    return tensors, metadata


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name stands twice")
    return out


def carried_files(folder: Path) -> Iterator[Path]:
    """What travels with the weights: tokenizer, chat template, generation config, license, code; no config."""
    for path in sorted(folder.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in ("config.json", RUN) and path.name[0] != ".":
            yield path
