"""inspect: what a checkpoint is, from its headers alone."""

from pathlib import Path
from typing import Any

from ropex.checkpoint import RUN, Checkpoint, is_gguf, is_run, locate, open_checkpoint, run_source
from ropex.config import ADAROPE, Rope, read_json, rope_of
from ropex.convert.source import is_rotary
from ropex.errors import UnsupportedError
from ropex.spec import method_name
from ropex.tables import METHODS


def inspect(path: str | Path) -> dict[str, Any]:
    """Facts about a folder, a GGUF file or a run. Reads headers only, imports no torch for a folder.

    Keys: family, layers, heads, kv_heads, head_dim, rotary_dim, pairing, method, rope_theta, window (tokens the model
    was trained for), dtype, parameters; beside them rope (type and parameters), claims (max_position_embeddings),
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
        }
    if is_gguf(found):
        config, dtype, parameters, tensors = _gguf_facts(found)
        return _facts(config, "interleaved", dtype, parameters) | {
            "shards": [found.name], "tensors": tensors, "notes": ["q and k rows are permuted when it is read"]
        }  # fmt: skip
    checkpoint = open_checkpoint(found)
    return _folder_facts(checkpoint)


def _folder_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    rope = checkpoint.rope
    spec = checkpoint.spec
    facts = _facts(checkpoint.config, rope.family.pairing, checkpoint.dtype, checkpoint.parameters)
    notes = [f"{name} is not in the index and is left aside" for name in checkpoint.stray]
    if spec is not None and not any(map(is_rotary, checkpoint.tensors)):
        notes.append("the config announces rotary tensors, and there are none: it will not load")
    return facts | {
        "shards": [file.name for file in checkpoint.shards],
        "tensors": len(checkpoint.tensors),
        "notes": notes,
        **({"spec": spec.block()} if spec else {}),
    }


def _facts(config: dict[str, Any], pairing: str, dtype: str, parameters: int) -> dict[str, Any]:
    rope = rope_of(config)
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
        "claims": rope.max_position_embeddings,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "adds": {} if ADAROPE in config else {name: added_parameters(name, rope) for name in METHODS if name != "rope"},
    }


def added_parameters(name: str, rope: Rope) -> int:
    """Trainable numbers that a conversion adds: delta [Hkv, F], tau and gamma [Hq] a layer for adarope."""
    return rope.layers * (rope.kv_heads * rope.pairs + 2 * rope.heads) if name == ADAROPE else 0


def _gguf_facts(path: Path) -> tuple[dict[str, Any], str, int, int]:
    """(config in Hugging Face's keys, the main tensor type, parameters, tensors) from a GGUF header."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UnsupportedError("reading GGUF needs the gguf package: pip install 'ropex[gguf]'") from None
    from ropex.errors import CheckpointError

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} is not a whole GGUF file ({error}): download it again") from None

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    arch = value("general.architecture")
    types: dict[str, int] = {}
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    names = {tensor.name for tensor in reader.tensors}
    config = {
        "model_type": arch,
        "num_hidden_layers": value(f"{arch}.block_count"),
        "num_attention_heads": value(f"{arch}.attention.head_count"),
        "num_key_value_heads": value(f"{arch}.attention.head_count_kv"),
        "hidden_size": value(f"{arch}.embedding_length"),
        "head_dim": value(f"{arch}.attention.key_length", value(f"{arch}.rope.dimension_count")),
        "max_position_embeddings": value(f"{arch}.context_length"),
        "rope_theta": float(value(f"{arch}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in names,
    }
    return config, max(types, key=lambda t: types[t]), sum(types.values()), len(names)
