"""Reading Meta's own folders: params.json and consolidated.NN.pth, one file or one for each model-parallel part."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropex.config import read_json, write_rope
from ropex.convert.read_bin import load_pickle
from ropex.convert.source import Source, Wanted, copy_rest
from ropex.convert.weights import reorder
from ropex.errors import CheckpointError, UnsupportedError
from ropex.pairing import head_permutation, repeat_heads

if TYPE_CHECKING:
    import torch

PARAMS = "params.json"
_SILENT = {
    "multiple_of",
    "ffn_dim_multiplier",
    "hidden_dim",
    "max_batch_size",
}  # w1's shape says the MLP's width
_READ = {"dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "norm_eps", "rope_theta",
         "use_scaled_rope", "rope_scale_factor", "rope_scaling_factor", "max_seq_len"}  # fmt: skip
_WINDOWS = {10_000.0: 4096, 500_000.0: 8192, 1_000_000.0: 16_384}  # Llama 2, Llama 3, Code Llama, by rope_theta
_SCALED_WINDOW = 131_072  # Llama 3.1 and later
_LLAMA_3_WORDS = 128_256
_WIDTH = "layers.0.feed_forward.w1.weight"

Parts = list[dict[str, "torch.Tensor"]]


@dataclass(frozen=True)
class _Tensor:
    """A tensor in Meta's files: its name there, the dimension that parts split (None: each part has all of it), its
    whole shape, and how many interleaved heads its rows make (0: its rows stay as they are)."""

    name: str
    split: int | None
    shape: tuple[int, ...]
    heads: int = 0


def read_meta(folder: Path, window: int | None = None) -> Source:
    """A folder of Meta's, as the llama checkpoint that it is: Hugging Face's names, q and k half-split.

    window: the tokens that the model was trained for, where `trained_window` would be wrong, as for Llama 1 (2048).
    Several parts are joined one tensor at a time. Errors: CheckpointError for what is missing or contradicts itself,
    UnsupportedError for parameters and tensors that a Llama does not have.
    """
    params = _params(folder)
    parts = _parts(folder)
    dim, heads = _whole(params, "dim"), _whole(params, "n_heads")
    kv_heads = _whole(params, "n_kv_heads") if params.get("n_kv_heads") else heads
    head_dim = _whole(params, "head_dim") if params.get("head_dim") else dim // heads
    layers = _whole(params, "n_layers")
    width = sum(part[_WIDTH].numel() for part in _having(parts, folder, _WIDTH)) // dim
    words = _words(parts, folder, dim)
    if params.get("vocab_size", -1) not in (-1, words.shape[0]):
        raise CheckpointError(
            f"{folder / PARAMS}: vocab_size is {params['vocab_size']}, but tok_embeddings.weight has {words.shape[0]} "
            "rows: a part is missing, or the two belong to different models"
        )
    tensors = {"model.embed_tokens.weight": words}
    for layer in range(layers):
        tensors |= _layer(layer, dim, heads, kv_heads, head_dim, width)
    tensors["model.norm.weight"] = _Tensor("norm.weight", None, (dim,))
    tied = _tied(parts)
    if not tied:
        tensors["lm_head.weight"] = _Tensor("output.weight", 0, words.shape)
    for tensor in tensors.values():
        _check(tensor, parts, folder)
    expected = {tensor.name for tensor in tensors.values()} | {"rope.freqs", "output.weight"}
    if unknown := sorted({name for part in parts for name in part} - expected):
        raise UnsupportedError(f"{folder} holds {unknown[0]}, which no Llama of {layers} layers has")
    permutation = head_permutation("interleaved", "half-split", head_dim, head_dim)

    def read(wanted: Wanted) -> Iterator[tuple[str, "torch.Tensor"]]:
        for name, tensor in tensors.items():
            if wanted(name):
                whole = _joined(tensor, parts)
                yield name, reorder(whole, repeat_heads(permutation, tensor.heads)) if tensor.heads else whole

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": str(parts[0][words.name].dtype).removeprefix("torch."),
        "vocab_size": words.shape[0],
        "hidden_size": dim,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(params.get("norm_eps", 1e-5)),
        "max_position_embeddings": window or trained_window(params),
        "tie_word_embeddings": tied,
        "bos_token_id": 128_000 if words.shape[0] == _LLAMA_3_WORDS else 1,
        "eos_token_id": [128_001, 128_008, 128_009] if words.shape[0] == _LLAMA_3_WORDS else 2,
    }
    notes = []
    if not window and not params.get("max_seq_len"):
        tokens = config["max_position_embeddings"]
        notes.append(f"{PARAMS} does not say how many tokens the model was trained for: taken to be {tokens}")
    size = sum(file.stat().st_size for file in folder.glob("consolidated.*.pth"))
    return Source(
        folder, write_rope(config, _rope_parameters(params, tied)), read, dict, size,
        lambda target: copy_rest(folder, target, (PARAMS, "checklist.chk")), notes=notes,
    )  # fmt: skip


def trained_window(params: dict[str, Any]) -> int:
    """The tokens that a model was trained for, which params.json does not say. In this order: `max_seq_len` if someone
    wrote it; 131072 with `use_scaled_rope` (Llama 3.1 and later); by rope_theta 8192 (500000, Llama 3), 16384
    (1000000, Code Llama) and 4096 (10000 or absent, Llama 2). Llama 1 looks like Llama 2: its 2048 must be given."""
    if params.get("max_seq_len"):
        return _whole(params, "max_seq_len")
    if params.get("use_scaled_rope"):
        return _SCALED_WINDOW
    theta = _theta(params)
    if theta not in _WINDOWS:
        raise CheckpointError(
            f"{PARAMS} does not say how many tokens the model was trained for (rope_theta is {theta:g}, which no model "
            "of Meta's has): give --window, such as 8k"
        )
    return _WINDOWS[theta]


def _rope_parameters(params: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The config's rope block. Meta's files leave the numbers of the scaling to its code; those here are from its own
    Hugging Face releases, where 3.2's 1B and 3B, the only ones with tied embeddings, have a factor of 32."""
    block: dict[str, Any] = {"rope_type": "default", "rope_theta": _theta(params)}
    if params.get("use_scaled_rope"):
        stated = params.get("rope_scale_factor") or params.get("rope_scaling_factor")
        block |= {
            "rope_type": "llama3",
            "factor": float(stated or (32.0 if tied else 8.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return block


def _params(folder: Path) -> dict[str, Any]:
    params = read_json(folder / PARAMS)
    for key, value in params.items():
        if key not in _READ | _SILENT and value not in (None, False):
            raise UnsupportedError(f"{folder / PARAMS} has {key} = {value!r}, which no Llama has: convert it elsewhere")
    return params


def _whole(params: dict[str, Any], key: str) -> int:
    value = params.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{PARAMS}: {key} is {value!r}, not a whole number above 0: download it again")
    return value


def _theta(params: dict[str, Any]) -> float:
    value = params.get("rope_theta") or 10_000.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{PARAMS}: rope_theta is {value!r}, not a number: download it again")
    return float(value)


def _parts(folder: Path) -> Parts:
    """Each part's tensors by name, mapped from the disk."""
    files = sorted(folder.glob("consolidated.*.pth"))
    if not files:
        raise CheckpointError(f"{folder} has {PARAMS} but no consolidated.00.pth: download it again")
    for number, file in enumerate(files):
        if file.name != f"consolidated.{number:02d}.pth":
            raise CheckpointError(f"{folder} has {file.name} but no consolidated.{number:02d}.pth: download it again")
    return [load_pickle(file) for file in files]


def _having(parts: Parts, folder: Path, name: str) -> Parts:
    """The parts, all of which must hold the tensor."""
    for number, part in enumerate(parts):
        if name not in part:
            raise CheckpointError(f"{folder / f'consolidated.{number:02d}.pth'} lacks {name}: download it again")
    return parts


def _words(parts: Parts, folder: Path, dim: int) -> _Tensor:
    """The word embeddings: parts split them by channel (Llama 1 and 2) or by word (Llama 3)."""
    name = "tok_embeddings.weight"
    rows = sum(part[name].numel() for part in _having(parts, folder, name)) // dim
    return _Tensor(name, 0 if parts[0][name].shape[-1:] == (dim,) else 1, (rows, dim))


def _layer(layer: int, dim: int, heads: int, kv_heads: int, head_dim: int, width: int) -> dict[str, _Tensor]:
    """One layer's tensors by Hugging Face's name. Projections into heads and into the MLP are split by output, those
    back by input."""
    q, kv = heads * head_dim, kv_heads * head_dim
    names = {
        "self_attn.q_proj": _Tensor("attention.wq", 0, (q, dim), heads),
        "self_attn.k_proj": _Tensor("attention.wk", 0, (kv, dim), kv_heads),
        "self_attn.v_proj": _Tensor("attention.wv", 0, (kv, dim)),
        "self_attn.o_proj": _Tensor("attention.wo", 1, (dim, q)),
        "mlp.gate_proj": _Tensor("feed_forward.w1", 0, (width, dim)),
        "mlp.up_proj": _Tensor("feed_forward.w3", 0, (width, dim)),
        "mlp.down_proj": _Tensor("feed_forward.w2", 1, (dim, width)),
        "input_layernorm": _Tensor("attention_norm", None, (dim,)),
        "post_attention_layernorm": _Tensor("ffn_norm", None, (dim,)),
    }
    return {
        f"model.layers.{layer}.{ours}.weight": _Tensor(f"layers.{layer}.{t.name}.weight", t.split, t.shape, t.heads)
        for ours, t in names.items()
    }


def _tied(parts: Parts) -> bool:
    """Is the head the word embeddings over again, or not there at all?"""
    import torch

    return all(
        "output.weight" not in part or torch.equal(part["output.weight"], part["tok_embeddings.weight"])
        for part in parts
    )


def _check(tensor: _Tensor, parts: Parts, folder: Path) -> None:
    """Do the parts make the shape that params.json promises?"""
    shapes = [list(part[tensor.name].shape) for part in _having(parts, folder, tensor.name)]
    whole = list(shapes[0])
    if tensor.split is not None and len(whole) == 2:
        whole[tensor.split] *= len(parts)
    if whole != list(tensor.shape) or any(shape != shapes[0] for shape in shapes):
        raise CheckpointError(
            f"{folder}: {tensor.name} of {len(parts)} part(s) makes {whole} where {PARAMS} says {list(tensor.shape)}: "
            "a part is missing, or the two belong to different models"
        )


def _joined(tensor: _Tensor, parts: Parts) -> "torch.Tensor":
    import torch

    if tensor.split is None:
        return parts[0][tensor.name].clone()
    return torch.cat([part[tensor.name] for part in parts], tensor.split)
