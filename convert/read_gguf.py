"""GGUF files: the header as a config.json, the tensors one at a time under their Hugging Face names.

What the keys and tensors mean is stated by llama.cpp (docs/gguf.md in ggml, src/llama-arch.cpp, convert_hf_to_gguf.py).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropex.checkpoint import open_gguf
from ropex.config import Rope, rope_of, write_rope
from ropex.convert.heads import row_index
from ropex.convert.output import write_json
from ropex.convert.source import Source, Wanted
from ropex.errors import CheckpointError, UnsupportedError
from ropex.families import FAMILIES, Pairing

if TYPE_CHECKING:
    import torch
    from gguf import ReaderTensor

# How q and k lie in a file of each architecture: llama.cpp turns llama's channels 2f with 2f + 1 (LLAMA_ROPE_TYPE_NORM)
# and qwen's f with f + R/2 (LLAMA_ROPE_TYPE_NEOX). A Mistral file says llama, and is one.
ARCHITECTURES: dict[str, Pairing] = {"llama": "interleaved", "qwen2": "half-split", "qwen3": "half-split"}
ROPE_FREQS = "rope_freqs.weight"  # a factor a channel pair [R/2], by which llama.cpp divides its frequency
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}  # every other type becomes float32
# Keys of the rope that change a model's frequencies in a way no config can say, and the values that change nothing.
_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0}

Value = Callable[..., Any]


@dataclass(frozen=True)
class Header:
    """config: config.json's content. pairing: of q and k in the file. dtype: the type most parameters have, as GGUF
    names it. tensors: by Hugging Face name, in file order. tokenizer: the file holds one."""

    config: dict[str, Any]
    pairing: Pairing
    dtype: str
    tensors: "dict[str, ReaderTensor]"
    tokenizer: bool

    @property
    def parameters(self) -> int:
        return sum(int(t.n_elements) for t in self.tensors.values())


def read_gguf(path: Path) -> Source:
    """A GGUF file as a source: tensors are dequantised one by one (quantised types to float32, F32, F16 and BF16 as
    they are), q and k in half-split order. Errors: UnsupportedError for other architectures, CheckpointError for files
    that are no GGUF or not whole."""
    header = gguf_header(path)
    rope = replace(rope_of(header.config), pairing=header.pairing)

    def tensors(wanted: Wanted) -> "Iterator[tuple[str, torch.Tensor]]":
        return ((name, _read(name, tensor, rope)) for name, tensor in header.tensors.items() if wanted(name))

    def carry(folder: Path) -> None:
        from ropex.loading import load_tokenizer, quiet

        if header.tokenizer:
            with quiet():
                load_tokenizer(path).save_pretrained(folder)
        ids = {k: v for k, v in header.config.items() if k.endswith("_token_id")}
        write_json(folder / "generation_config.json", ids)

    size = sum(int(t.n_elements) * (2 if t.tensor_type.name in _DTYPES else 4) for t in header.tensors.values())
    return Source(path, header.config, tensors, dict, size, carry)


def gguf_header(path: Path) -> Header:
    """What a GGUF file says of itself. No tensor is read but the few factors of `rope_freqs.weight`; needs no torch."""
    reader = open_gguf(path)

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    arch = value("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"{path} holds the architecture '{arch}', and ropex reads GGUF files of {', '.join(ARCHITECTURES)}: "
            "convert from the Hugging Face checkpoint"
        )
    if value("split.count", 1) > 1:
        raise UnsupportedError(f"{path} is one of {value('split.count')} parts: join them (llama-gguf-split --merge)")
    found = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, arch, lambda key, default=None: value(f"{arch}.{key}", default), found)
    for key, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := value(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    names = tensor_names(config)
    if lacking := sorted(names.keys() - found.keys()):
        raise CheckpointError(f"{path} lacks the tensor {lacking[0]}: it is incomplete, download it again")
    if unknown := sorted(found.keys() - names.keys() - {ROPE_FREQS}):
        raise UnsupportedError(f"{path} has the tensor {unknown[0]}, which {config['model_type']} does not know")
    config["vocab_size"] = int(found["token_embd.weight"].shape[1])  # ggml's order: [hidden, vocabulary]
    types: dict[str, int] = {}
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    dtype = max(types, key=lambda t: types[t])
    config["dtype"] = _DTYPES.get(dtype, "float32")
    rope_of(config)
    tensors = {names[name]: tensor for name, tensor in found.items() if name != ROPE_FREQS}
    return Header(config, ARCHITECTURES[arch], dtype, tensors, value("tokenizer.ggml.tokens") is not None)


def tensor_names(config: dict[str, Any]) -> dict[str, str]:
    """{GGUF name: Hugging Face name} of every tensor that a model of this config has."""
    model_type = config["model_type"]
    top = [n for n in _TOP if n != "output" or not config.get("tie_word_embeddings")]
    weights = [n for n in _LAYER if FAMILIES[model_type].q_norm or not n.endswith(("q_norm", "k_norm"))]
    biases = []
    if model_type == "qwen2" or config.get("attention_bias"):
        biases += ["attn_q", "attn_k", "attn_v"]
    if model_type != "qwen2" and config.get("attention_bias"):
        biases += ["attn_output"]
    if config.get("mlp_bias"):
        biases += ["ffn_gate", "ffn_up", "ffn_down"]
    names = {f"{n}.weight": f"{_TOP[n]}.weight" for n in top}
    for layer in range(config["num_hidden_layers"]):
        for kind, modules in (("weight", weights), ("bias", biases)):
            names |= {f"blk.{layer}.{n}.{kind}": f"model.layers.{layer}.{_LAYER[n]}.{kind}" for n in modules}
    return names


def _config(path: Path, arch: str, value: Value, found: "dict[str, ReaderTensor]") -> dict[str, Any]:
    """config.json but for the vocabulary. value: reads a key of the architecture."""

    def number(key: str, default: int | None = None) -> Any:
        stated = value(key, default)
        if isinstance(stated, bool) or not isinstance(stated, int | float) or stated <= 0:
            raise CheckpointError(f"{path}: {arch}.{key} is {stated!r}, not a number: convert from the Hugging Face "
                                  "checkpoint")  # fmt: skip
        return stated

    if value("expert_count", 0):
        raise UnsupportedError(f"{path} is a mixture of experts: convert from the Hugging Face checkpoint")
    heads, hidden, context = (number(k) for k in ("attention.head_count", "embedding_length", "context_length"))
    head_dim = number("attention.key_length", hidden // heads)
    if {value("attention.value_length", head_dim), value("rope.dimension_count", head_dim)} != {head_dim}:
        raise UnsupportedError(
            f"{path} has heads of {head_dim} channels whose values are longer or shorter, or which do not turn whole: "
            f"{arch} has no such model"
        )
    config: dict[str, Any] = {
        "architectures": [FAMILIES[arch].causal_lm],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in found,
    }
    if arch != "qwen2":  # whose q, k and v always have one
        config["attention_bias"] = "blk.0.attn_q.bias" in found
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in found
    return write_rope(config, _rope_parameters(path, value, head_dim, context, found.get(ROPE_FREQS)))


def _rope_parameters(
    path: Path, value: Value, head_dim: int, context: int, freqs: "ReaderTensor | None"
) -> dict[str, Any]:
    """The rope block. llama.cpp turns pair f by base^(-2f/R) / (linear factor * rope_freqs[f]) and multiplies q and k
    by attn_factor, YaRN's own 0.1 ln(factor) + 1 beside it (src/llama-context.cpp)."""
    kind = value("rope.scaling.type", "linear")  # linear without a factor is no scaling: llama.cpp's default
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(f"{path} has the rope scaling '{kind}': convert from the Hugging Face checkpoint")
    for key, neutral in _NEUTRAL.items():
        if value(f"rope.scaling.{key}", neutral) != neutral:
            raise UnsupportedError(f"{path} sets rope.scaling.{key}, which no config.json can say: convert from the "
                                   "Hugging Face checkpoint")  # fmt: skip
    theta = {"rope_theta": _decimal(value("rope.freq_base", 10_000.0))}
    factor = _decimal(value("rope.scaling.factor", value("rope.scale_linear", 1.0))) if kind != "none" else 1.0
    attention = _decimal(value("rope.scaling.attn_factor", 1.0))
    if kind == "yarn":
        if freqs is not None:
            raise UnsupportedError(f"{path} has both {ROPE_FREQS} and YaRN, which no config.json can say")
        betas = {k: _decimal(value(f"rope.scaling.yarn_{k}", d)) for k, d in (("beta_fast", 32.0), ("beta_slow", 1.0))}
        return {
            "rope_type": "yarn",
            **theta,
            "factor": factor,
            "original_max_position_embeddings": value("rope.scaling.original_context_length", context),
            **betas,
            "attention_factor": None if attention == 1 else attention * yarn_attention(factor),
        }
    if freqs is None and attention == 1:
        return {"rope_type": "default", **theta} if factor == 1 else {"rope_type": "linear", **theta, "factor": factor}
    factors = np.ones(head_dim // 2, np.float32) if freqs is None else np.array(freqs.data, np.float32)
    table = (factors * np.float32(factor)).tolist()
    return {
        "rope_type": "longrope",
        **theta,
        "factor": 1.0,
        "long_factor": table,
        "short_factor": table,
        "attention_factor": attention,
        "original_max_position_embeddings": context,
    }


def yarn_attention(factor: float) -> float:
    """YaRN's attention factor where none is stated (arXiv 2309.00071, eq. 22)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read(name: str, tensor: "ReaderTensor", rope: Rope) -> "torch.Tensor":
    """One tensor, decoded and in half-split order; rope: with the file's pairing."""
    import torch
    from gguf import dequantize

    from ropex.convert.weights import reorder

    kind = tensor.tensor_type.name
    if kind in ("F32", *_DTYPES):
        out = torch.from_numpy(np.array(tensor.data))  # BF16 comes as bytes
        out = out.view(torch.bfloat16) if kind == "BF16" else out
    else:
        try:
            out = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError:
            raise UnsupportedError(
                f"{name} has the type {kind}, which the gguf package does not decode: convert from the Hugging Face "
                "checkpoint"
            ) from None
    index = row_index(name, tuple(out.shape), "F32", rope, "half-split")
    return out if index is None else reorder(out, index)


def _decimal(number: float) -> float:
    """The shortest decimal that gives this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))
