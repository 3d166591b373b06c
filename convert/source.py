"""A checkpoint to read from, whatever its format: its config, its tensors one at a time, its other files."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any

from ropex.checkpoint import Checkpoint, carried_files, is_gguf, is_run, locate, open_checkpoint
from ropex.config import ADAROPE, Rope
from ropex.convert.output import PROVENANCE, write_json
from ropex.errors import CheckpointError, OptionError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MODELING = "modeling_adarope.py"
TOKENIZER_CONFIG = "tokenizer_config.json"


Wanted = Callable[[str], bool]


def every(name: str) -> bool:
    """All tensors are wanted."""
    return True


@dataclass(frozen=True)
class Source:
    """config: config.json's content. tensors(wanted): (name, tensor) pairs in file order, rotary ones left out.
    rotary(): our own tensors, if the source is converted. bytes: what its weights take on disk.
    carry(folder): put the tokenizer and every other file into folder. checkpoint: the folder, None for GGUF."""

    path: Path
    config: dict[str, Any]
    tensors: Callable[[Wanted], Iterator[tuple[str, "torch.Tensor"]]]
    rotary: Callable[[], dict[str, "torch.Tensor"]]
    bytes: int
    carry: Callable[[Path], None]
    checkpoint: Checkpoint | None = None


def is_rotary(name: str) -> bool:
    """True for `...adarope.delta` and its siblings."""
    return name.rpartition(".")[0].endswith(f".{ADAROPE}")


def open_source(path: str | Path) -> Source:
    """A folder (its headers checked) or a GGUF file (dequantised to float32)."""
    found = locate(path)
    if is_run(found):
        raise UnsupportedError(
            f"{path} is a run, and a conversion starts from a checkpoint: write it with `ropex export`"
        )
    return _gguf(found) if is_gguf(found) else _folder(open_checkpoint(found))


def _folder(checkpoint: Checkpoint) -> Source:
    from safetensors import safe_open

    def read(wanted: Wanted) -> Iterator[tuple[str, "torch.Tensor"]]:
        for file in checkpoint.shards:
            with safe_open(file, "pt") as shard:
                for name, info in checkpoint.tensors.items():
                    if info.file == file and wanted(name):
                        yield name, shard.get_tensor(name)

    def carry(folder: Path) -> None:
        for file in carried_files(checkpoint.path):
            if file.name not in (PROVENANCE, MODELING, "README.md"):  # a model card speaks of the parent
                copyfile(file, folder / file.name)

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


def _gguf(path: Path) -> Source:
    from ropex.loading import load, load_tokenizer, quiet

    model = load(path)
    config = _plain_config(model)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {}) if config.get("tie_word_embeddings") else set()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}

    def carry(folder: Path) -> None:
        with quiet():
            load_tokenizer(path).save_pretrained(folder)
            model.generation_config.save_pretrained(folder)

    size = sum(t.numel() * t.element_size() for t in state.values())
    return Source(path, config, lambda wanted: ((n, t) for n, t in state.items() if wanted(n)), dict, size, carry)


def _plain_config(model: "PreTrainedModel") -> dict[str, Any]:
    """config.json of a model read from GGUF: what differs from the family's defaults, and the geometry."""
    config = model.config
    geometry = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"}
    geometry |= {"num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"}
    named = geometry | set(config.to_diff_dict()) - {"quantization_config", "architectures"}
    plain = {k: v for k, v in config.to_dict().items() if k in named and not k.startswith("_")}
    return {"architectures": [type(model).__name__]} | plain


def require_finite(source: Source, rope: Rope) -> None:
    """A NaN or infinity in q or k spoils every logit behind it: refuse it by name."""
    projections = (f".{rope.family.q_proj}", f".{rope.family.k_proj}")
    for name, tensor in source.tensors(lambda name: name.rpartition(".")[0].endswith(projections)):
        if not tensor.isfinite().all():
            raise CheckpointError(f"{source.path}: {name} has values that are not finite numbers: it is damaged")


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
