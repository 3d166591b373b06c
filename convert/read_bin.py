"""Reading a Hugging Face folder whose weights are PyTorch's own files. No code in a file is run."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from ropex.config import backbone_type, read_json
from ropex.convert.source import Source, Wanted, copy_rest
from ropex.errors import CheckpointError
from ropex.families import family

if TYPE_CHECKING:
    import torch

BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
_HEADS = {"embed_tokens.weight": "lm_head.weight", "embed_in.weight": "embed_out.weight"}  # the second: GPT-NeoX


def read_bin(folder: Path) -> Source:
    """A folder with pytorch_model.bin, alone or in shards with an index.

    A head that is the word embeddings over again comes out once if the config ties the two; if they differ, both come
    out and the returned config no longer ties them. Frequency buffers of old checkpoints are dropped. Errors:
    CheckpointError for a file that is missing, damaged or needs code to be read, and for an index that disagrees.
    """
    import torch

    config = read_json(folder / "config.json")
    shards = _shards(folder)
    where = {name: file for file, names in shards.items() for name in names}
    dropped, notes = "", []
    pair = words_and_head(where)
    if pair and pair[1] in where and ties_words(config):
        words, head = (load_pickle(where[name])[name] for name in pair)
        if torch.equal(words, head):
            dropped = pair[1]
        else:
            config = config | {"tie_word_embeddings": False}
            notes.append(f"the config ties {pair[1]} to the word embeddings, but they differ: both are kept")

    def read(wanted: Wanted) -> Iterator[tuple[str, "torch.Tensor"]]:
        for file, names in shards.items():
            tensors = load_pickle(file)
            for name in names:
                if name != dropped and wanted(name):
                    yield name, tensors[name].clone()

    size = sum(file.stat().st_size for file in shards)
    return Source(folder, config, read, dict, size, lambda target: copy_rest(folder, target), notes=notes)


def load_pickle(path: Path) -> dict[str, "torch.Tensor"]:
    """The tensors of a torch.save file by name, mapped from the disk and not yet read. Errors: CheckpointError for a
    file that is no plain collection of tensors, or not whole."""
    import torch

    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(b"version "):
        raise CheckpointError(f"{path} is a git-lfs pointer: fetch the weights with `git lfs pull`")
    if not is_zipfile(path):
        if not start or start.startswith(b"PK"):
            raise CheckpointError(f"{path} ends after {path.stat().st_size} bytes: download it again")
        raise CheckpointError(f"{path} is no torch.save file of PyTorch 1.6 or later: load it there and save it again")
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        needed = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise CheckpointError(
            f"{path} cannot be read without running code from it ({needed[1] if needed else 'damaged'}), which may do "
            "anything: get the checkpoint as safetensors"
        ) from None
    except Exception as error:  # a damaged archive fails in many ways
        raise CheckpointError(f"{path} is damaged ({str(error).splitlines()[0][:120]}): download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not tensors by name: save model.state_dict()")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: {name!r} is no tensor: save model.state_dict() alone")
    return {name: tensor.detach() for name, tensor in value.items()}


def ties_words(config: dict[str, Any]) -> bool:
    """Are the word embeddings the head as well? Where config.json is silent, the family's config class decides."""
    if config.get("tie_word_embeddings") is not None:
        return bool(config["tie_word_embeddings"])
    import transformers

    return bool(getattr(transformers, family(backbone_type(config), config).config_name).tie_word_embeddings)


def words_and_head(names: Iterable[str]) -> tuple[str, str] | None:
    """The names of the word embeddings, and of the head that may be tied to them."""
    for name in names:
        for words, head in _HEADS.items():
            if name.endswith(f".{words}"):
                return name, head
    return None


def _shards(folder: Path) -> dict[Path, list[str]]:
    """The weight files and the names of their tensors, checked against the index."""
    index = folder / BIN_INDEX
    if not index.exists():
        if not (folder / BIN).is_file():
            raise CheckpointError(f"{folder} has neither {BIN} nor {BIN_INDEX}: download it again")
        return {folder / BIN: _names(folder / BIN)}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of names to files: download it again")
    files = sorted(set(weight_map.values()))
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the shard {name!r}, which lies outside the folder: download it again")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names the shard {name}, which is missing: download it again")
    shards = {folder / name: _names(folder / name) for name in files}
    for shard, names in shards.items():
        for tensor in names:
            if weight_map.get(tensor) != shard.name:
                said = f"puts into {weight_map[tensor]}" if tensor in weight_map else "does not name"
                raise CheckpointError(f"{shard} holds {tensor}, which the index {said}: download both again")
    held = {tensor for names in shards.values() for tensor in names}
    for tensor, name in sorted(weight_map.items()):
        if tensor not in held and not _is_stale(tensor):
            raise CheckpointError(f"{index} names {tensor} in {name}, which does not hold it: download both again")
    return shards


def _names(file: Path) -> list[str]:
    return [name for name in load_pickle(file) if not _is_stale(name)]


def _is_stale(name: str) -> bool:
    """A table of frequencies that old versions of transformers saved; the config says the same."""
    return name.endswith("rotary_emb.inv_freq")
