"""A checkpoint to read from, whatever its format: its config, its tensors one at a time, its other files."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile, copytree
from typing import TYPE_CHECKING, Any

from ropex.checkpoint import (
    Checkpoint,
    carried_files,
    is_gguf,
    is_meta,
    is_pickled,
    is_run,
    locate,
    open_checkpoint,
)
from ropex.config import ADAROPE, Rope
from ropex.convert.output import PROVENANCE, write_json
from ropex.errors import CheckpointError, OptionError, UnsupportedError
from ropex.spec import RotarySpec

if TYPE_CHECKING:
    import torch

MODELING = "modeling_adarope.py"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATES = "additional_chat_templates"  # the one folder that belongs to a tokenizer


Wanted = Callable[[str], bool]


def every(name: str) -> bool:
    """All tensors are wanted."""
    return True


@dataclass(frozen=True)
class Source:
    """config: config.json's content. tensors(wanted): (name, tensor) pairs in file order, rotary ones left out.
    rotary(): our own tensors, if the source is converted. bytes: what its weights take on disk.
    carry(folder): put the tokenizer and every other file into folder. checkpoint: the safetensors folder, None for
    other formats. notes: what the user should know of the source."""

    path: Path
    config: dict[str, Any]
    tensors: Callable[[Wanted], Iterator[tuple[str, "torch.Tensor"]]]
    rotary: Callable[[], dict[str, "torch.Tensor"]]
    bytes: int
    carry: Callable[[Path], None]
    checkpoint: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)


def is_rotary(name: str) -> bool:
    """True for `...adarope.delta` and its siblings."""
    return name.rpartition(".")[0].endswith(f".{ADAROPE}")


def whole_rotary(source: Source, spec: RotarySpec, rope: Rope) -> dict[str, "torch.Tensor"]:
    """The rotary tensors of a converted source; one that lacks some would start over without a word, and is refused."""
    rotary, belong = source.rotary(), 4 * len(spec.layers(rope))
    if len(rotary) != belong:
        raise CheckpointError(
            f"{source.path} holds {len(rotary)} rotary tensors where {belong} belong: the checkpoint is incomplete"
        )
    return rotary


def open_source(path: str | Path, window: int | None = None) -> Source:
    """A Hugging Face folder (safetensors, or PyTorch's own files), a folder of Meta's, or a GGUF file (dequantised).

    window: the tokens that the model was trained for, which a folder of Meta's does not always say.
    """
    found = locate(path)
    if window is not None and not is_meta(found):
        raise OptionError(f"--window is for a folder of Meta's: {path} says its own")
    if is_run(found):
        raise UnsupportedError(
            f"{path} is a run, and a conversion starts from a checkpoint: write it with `ropex export`"
        )
    if is_gguf(found):
        from ropex.convert.read_gguf import read_gguf

        return read_gguf(found)
    if is_meta(found):
        from ropex.convert.read_meta import read_meta

        return read_meta(found, window)
    if is_pickled(found):
        from ropex.convert.read_bin import read_bin

        return read_bin(found)
    return _folder(open_checkpoint(found))


def _folder(checkpoint: Checkpoint) -> Source:
    from safetensors import safe_open

    def read(wanted: Wanted) -> Iterator[tuple[str, "torch.Tensor"]]:
        for file in checkpoint.shards:
            with safe_open(file, "pt") as shard:
                for name, info in checkpoint.tensors.items():
                    if info.file == file and wanted(name):
                        yield name, shard.get_tensor(name)

    def carry(folder: Path) -> None:
        copy_rest(checkpoint.path, folder)

    return Source(
        checkpoint.path,
        checkpoint.config,
        lambda wanted: read(
            lambda name: wanted(name) and not is_rotary(name) and not name.endswith("rotary_emb.inv_freq")
        ),
        lambda: dict(read(is_rotary)),
        sum(file.stat().st_size for file in checkpoint.shards),
        carry,
        checkpoint,
    )


def copy_rest(source: Path, target: Path, besides: tuple[str, ...] = ()) -> None:
    """Copy what travels with the weights; a model card speaks of the parent, and stays."""
    for file in carried_files(source):
        if file.name not in (PROVENANCE, MODELING, "README.md", *besides):
            copyfile(file, target / file.name)
    if (source / TEMPLATES).is_dir():
        copytree(source / TEMPLATES, target / TEMPLATES)


def raise_tokenizer_limit(folder: Path, target: int) -> None:
    """A tokenizer that states a shorter limit than the new window would cut inputs: let it follow."""
    path = folder / TOKENIZER_CONFIG
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8"))
        limit = config.get("model_max_length")
        if isinstance(limit, int | float) and limit < target:
            write_json(path, config | {"model_max_length": target})


def parse_size(text: str) -> int:
    """'5GB' or '200MB' in bytes."""
    units = {"GB": 10**9, "MB": 10**6, "KB": 10**3}
    unit = text.strip()[-2:].upper()
    try:
        size = int(float(text.strip()[:-2]) * units[unit])
    except (KeyError, ValueError):
        raise OptionError(f"'{text}' is not a size: write it as 5GB or 200MB") from None
    if size < 1:
        raise OptionError(f"'{text}' is not a size: write it as 5GB or 200MB")
    return size
