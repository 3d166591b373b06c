"""A model as one GGUF file for llama.cpp, through the gguf package's writer.

Keys and tensors are those that llama.cpp reads (src/llama-model.cpp, src/models/llama.cpp, qwen2.cpp and qwen3.cpp).
What it cannot express is refused.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropex.checkpoint import open_gguf
from ropex.config import Rope, backbone_type, read_json, rope_of
from ropex.convert.heads import row_index
from ropex.convert.read_gguf import ARCHITECTURES, ROPE_FREQS, tensor_names, yarn_attention
from ropex.convert.weights import reorder
from ropex.errors import CheckpointError, UnsupportedError
from ropex.spec import spec_of
from ropex.tables import longrope_block, table

if TYPE_CHECKING:
    import torch
    from gguf import GGUFWriter, TokenType

_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}

# tokenizer.ggml.pre by how a tokenizer.json splits text before its merges: [pattern, ...] of its Split and Digits
# steps, "" for ByteLevel's own, and whether whole words skip the merges. From llm_tokenizer_bpe and
# llama_vocab::impl::load in llama.cpp's src/llama-vocab.cpp, which quotes these patterns from the models' files.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[tuple[tuple[str, ...] | None, bool], str] = {
    ((_WORDS + r"\p{N}{1,3}" + _SIGNS,), True): "llama-bpe",  # Llama 3
    ((_WORDS + r"\p{N}{1,3}" + _SIGNS,), False): "smaug-bpe",  # its pattern with ordinary merges
    ((_WORDS + r"\p{N}" + _SIGNS,), False): "qwen2",  # Qwen 2, 2.5 and 3
    ((_TEKKEN,), True): "tekken",  # Mistral Nemo
    (("digits", ""), False): "smollm",  # SmolLM and SmolLM2
    (("",), False): "gpt-2",
}


def write_gguf(
    config: dict[str, Any],
    tensors: "Iterable[tuple[str, torch.Tensor]]",
    folder_with_tokenizer: Path,
    out: Path,
    source_gguf: Path | None,
) -> None:
    """Write the model of config.json's content and its tensors (Hugging Face names, half-split order) to `out`.

    Matrices keep their dtype; tensors of one dimension become float32, as llama.cpp wants them. One tensor is in memory
    at a time: they wait on the disk in OUT.part until the header, which stands in front of them, is known.
    source_gguf: the GGUF file that the model comes from, whose tokenizer is copied; else the folder's is translated.
    Errors: UnsupportedError for what llama.cpp does not know, CheckpointError for tensors that lack or do not belong.
    """
    try:
        from gguf import GGUFWriter, LlamaFileType
    except ImportError:
        raise UnsupportedError("writing GGUF needs the gguf package: pip install gguf sentencepiece") from None
    rope = _checked(config)
    writer = GGUFWriter(out, _FAMILIES[config["model_type"]], use_temp_file=True)
    _add_model(writer, config, rope, out.stem)
    freqs = _add_rope(writer, config, rope)
    _add_tokenizer(writer, config, folder_with_tokenizer, source_gguf)
    spool = out.with_name(f"{out.name}.part")
    with spool.open("w+b") as file:
        writer.temp_file = file  # type: ignore[assignment]  # beside the output, since /tmp may be small
        dtype = _add_tensors(writer, config, rope, tensors)
        if freqs is not None:
            writer.add_tensor(ROPE_FREQS, freqs)
        writer.add_file_type(LlamaFileType[_FILE_TYPES[dtype]])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    spool.unlink()


def _checked(config: dict[str, Any]) -> Rope:
    """The rope of a model that llama.cpp can run; the reason why it cannot as an error."""
    if backbone_type(config) not in _FAMILIES:
        raise UnsupportedError(
            f"ropex writes GGUF files of {', '.join(_FAMILIES)}, not of '{backbone_type(config)}': export as "
            "safetensors"
        )
    spec = spec_of(config)
    if spec is not None and not spec.shared:
        raise UnsupportedError(
            "llama.cpp has one frequency table and one constant scale for all heads; a GGUF file would lose the "
            "frequencies and the length-dependent scale of every head. Export as safetensors, or train with "
            "--share-heads"
        )
    if spec is not None:
        raise UnsupportedError(
            "llama.cpp has no attention scale that grows with the length; a GGUF file would lose it. Export as "
            "safetensors, fold its value at N tokens into q with --bake-length N, or drop it with --no-scale"
        )
    rope, name = rope_of(config), config["model_type"]
    for key in ("vocab_size", "hidden_size", "intermediate_size"):
        if not isinstance(config.get(key), int):
            raise CheckpointError(f"config.json: {key} is {config.get(key)!r}, not a number: download it again")
    sliding = config.get("sliding_window", 4096 if name == "mistral" else None)
    if name.startswith("qwen") and not config.get("use_sliding_window"):
        sliding = None
    if sliding is not None and sliding < rope.max_position_embeddings:
        raise UnsupportedError(
            f"the model looks back {sliding} tokens (sliding_window), which llama.cpp's {_FAMILIES[name]} does not do: "
            "export as safetensors"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(
            f"llama.cpp's {_FAMILIES[name]} has silu, not '{config['hidden_act']}': export as safetensors"
        )
    if name == "qwen2" and rope.heads * rope.head_dim != config["hidden_size"]:
        raise UnsupportedError(
            f"llama.cpp's qwen2 takes heads of hidden_size / num_attention_heads channels, not {rope.head_dim}: "
            "export as safetensors"
        )
    if rope.rotary_dim != rope.head_dim:
        raise UnsupportedError(
            f"llama.cpp's {_FAMILIES[name]} turns whole heads of {rope.head_dim} channels, not {rope.rotary_dim}: "
            "export as safetensors"
        )
    return rope


def _add_model(writer: "GGUFWriter", config: dict[str, Any], rope: Rope, name: str) -> None:
    writer.add_name(name)
    writer.add_type("model")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(rope.max_position_embeddings)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(rope.layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(rope.heads)
    writer.add_head_count_kv(rope.kv_heads)
    writer.add_key_length(rope.head_dim)
    writer.add_value_length(rope.head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))  # transformers' default in all these families
    writer.add_rope_dimension_count(rope.head_dim)
    writer.add_rope_freq_base(rope.rope_theta)


def _add_rope(writer: "GGUFWriter", config: dict[str, Any], rope: Rope) -> np.ndarray | None:
    """Scaling keys where llama.cpp has a type that says the same; else the factors [R/2] of `rope_freqs.weight`, by
    which llama.cpp divides base^(-2f/R). What is more than the type's own attention factor goes to attn_factor, which
    multiplies q and k as transformers' does."""
    from gguf import RopeScalingType

    scaling, arch = rope.scaling, _FAMILIES[config["model_type"]]
    if rope.rope_type == "dynamic" or scaling.get("short_factor") != scaling.get("long_factor"):
        raise UnsupportedError(
            f"the model's '{rope.rope_type}' changes its table with the length of the input, and llama.cpp's {arch} "
            "has one table: export as safetensors"
        )
    found = table("rope", rope, {})
    attention, freqs = found.attention_factor, None
    if rope.rope_type == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif rope.rope_type == "yarn" and _is_llamas_yarn(scaling):
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.window)
        attention /= yarn_attention(scaling["factor"])
    elif rope.rope_type != "default":
        if arch != "llama":
            raise UnsupportedError(
                f"llama.cpp's {arch} reads no factors for single frequencies, so this table ({rope.rope_type}) would "
                "be lost: export as safetensors"
            )
        freqs = np.array(scaling.get("long_factor") or longrope_block(found.theta, rope)["long_factor"], np.float32)
    if attention != 1:
        writer.add_rope_scaling_attn_factors(attention)
    return freqs


def _is_llamas_yarn(scaling: dict[str, Any]) -> bool:
    """llama.cpp's llama and qwen turn by YaRN's own bounds, rounded to whole pairs, and read no others."""
    bounds = (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    return bounds == (32, 1) and scaling.get("truncate", True)


def _add_tensors(
    writer: "GGUFWriter", config: dict[str, Any], rope: Rope, tensors: "Iterable[tuple[str, torch.Tensor]]"
) -> str:
    """Add them one by one in GGUF's names and order of rows; returns the dtype that most parameters have."""
    import torch
    from gguf import GGMLQuantizationType

    pairing = ARCHITECTURES[_FAMILIES[config["model_type"]]]
    names = {theirs: name for name, theirs in tensor_names(config).items()}
    sizes: dict[str, int] = {}
    for theirs, tensor in tensors:
        if theirs == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        name = names.pop(theirs, None)
        if name is None:
            raise CheckpointError(
                f"{theirs} is twice there or no tensor of {config['model_type']}: GGUF has no place for it"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _FILE_TYPES:
            raise UnsupportedError(f"{theirs} is {dtype}: export with --dtype float32, bfloat16 or float16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.numel()
        index = row_index(theirs, tuple(tensor.shape), "F32", rope, pairing)
        out = tensor if index is None else reorder(tensor, index)
        if out.ndim == 1:
            out = out.float()
        if out.dtype == torch.bfloat16:  # numpy has none: as bytes
            writer.add_tensor(name, out.contiguous().view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, out.contiguous().numpy())
    if names:
        raise CheckpointError(f"the model lacks the tensor {min(names)}: the checkpoint is incomplete")
    return max(sizes, key=lambda d: sizes[d])


def _add_tokenizer(writer: "GGUFWriter", config: dict[str, Any], folder: Path, source_gguf: Path | None) -> None:
    if source_gguf is not None:
        _copy_tokenizer(writer, source_gguf, config["vocab_size"])
    elif (folder / "tokenizer.model").exists():
        _add_sentencepiece(writer, config, folder)
    elif (folder / "tokenizer.json").exists():
        _add_byte_level(writer, config, folder)
    else:
        writer.add_tokenizer_model("no_vocab")  # llama.cpp's word for it: token ids in, token ids out


def _copy_tokenizer(writer: "GGUFWriter", source: Path, rows: int) -> None:
    """The tokenizer.* keys of another GGUF file, strings as the bytes that stand there."""
    from gguf import GGUFValueType

    for key, field in open_gguf(source).fields.items():
        if key == "tokenizer.ggml.tokens" and len(field.data) != rows:
            raise CheckpointError(f"{source} has {len(field.data)} tokens, and the embedding {rows} rows")
        if key.startswith("tokenizer."):
            strings = field.types[-1] == GGUFValueType.STRING
            values = [bytes(field.parts[i]) for i in field.data] if strings else field.contents()
            array = field.types[0] == GGUFValueType.ARRAY
            value = values[0] if strings and not array else values
            writer.add_key_value(key, value, field.types[0], field.types[-1] if array else None)


def _add_byte_level(writer: "GGUFWriter", config: dict[str, Any], folder: Path) -> None:
    """A byte-level BPE from tokenizer.json; a way to split text that llama.cpp is not known to have is refused."""
    from gguf import TokenType

    stored = read_json(folder / "tokenizer.json")
    model = stored["model"]
    pre = PRE_TOKENIZERS.get((_splits(stored), bool(model.get("ignore_merges"))))
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedError(
            f"{folder / 'tokenizer.json'} is no byte-level BPE: put the tokenizer.model that it was made from beside it"
        )
    if pre is None:
        raise UnsupportedError(
            f"{folder / 'tokenizer.json'} splits text in a way that is not known to be llama.cpp's: convert this "
            "checkpoint to safetensors, and to GGUF with llama.cpp's own convert_hf_to_gguf.py"
        )
    tokens = {index: (token, TokenType.NORMAL) for token, index in model["vocab"].items()}
    for token in stored.get("added_tokens", []):
        tokens[token["id"]] = (token["content"], _kind(token))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    names, kinds = _padded(tokens, config["vocab_size"], folder)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    _add_specials(writer, config, folder, {"bos": False})


def _splits(tokenizer: dict[str, Any]) -> tuple[str, ...] | None:
    """How a tokenizer.json cuts text into words, as PRE_TOKENIZERS spells it; None for a step that is not known."""
    # llama.cpp normalises nothing, Qwen's NFC neither: text with combining marks may come apart otherwise there.
    if (tokenizer.get("normalizer") or {}).get("type") not in (None, "NFC"):
        return None
    pre = tokenizer.get("pre_tokenizer") or {}
    found = []
    for step in pre.get("pretokenizers", [pre]):
        if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            found.append(step["pattern"].get("Regex"))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            found.append("digits")
        elif step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
            found += [""] if step.get("use_regex", True) else []
        else:
            return None
    return tuple(found)


def _add_sentencepiece(writer: "GGUFWriter", config: dict[str, Any], folder: Path) -> None:
    from gguf import SentencePieceVocab

    try:
        vocab = SentencePieceVocab(folder)
    except RuntimeError:
        raise UnsupportedError(f"reading {folder / 'tokenizer.model'} needs pip install sentencepiece") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'tokenizer.model'} is not readable ({error}): download it again") from None
    pieces = [(text.decode(), score, kind) for text, score, kind in vocab.all_tokens()]
    tokens = {index: (text, kind) for index, (text, _, kind) in enumerate(pieces)}
    if (folder / "tokenizer.json").exists():
        for token in read_json(folder / "tokenizer.json").get("added_tokens", []):
            if token["id"] >= vocab.vocab_size_base:
                tokens[token["id"]] = (token["content"], _kind(token))
    names, kinds = _padded(tokens, config["vocab_size"], folder)
    scores = [score for _, score, _ in pieces] + [-1000.0] * (len(names) - len(pieces))  # added ones are never merged
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    _add_specials(writer, config, folder, {})


def _kind(added: dict[str, Any]) -> "TokenType":
    from gguf import TokenType

    return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED


def _padded(tokens: "dict[int, tuple[str, TokenType]]", rows: int, folder: Path) -> "tuple[list[str], list[TokenType]]":
    """Tokens and their kinds, one for every row of the embedding: llama.cpp counts the vocabulary by this list."""
    from gguf import TokenType

    if max(tokens) >= rows:
        raise CheckpointError(f"the tokenizer in {folder} has the token {max(tokens)}, and the embedding {rows} rows")
    found = [tokens.get(index, (f"[PAD{index}]", TokenType.UNUSED)) for index in range(rows)]
    return [token for token, _ in found], [kind for _, kind in found]


def _add_specials(writer: "GGUFWriter", config: dict[str, Any], folder: Path, add: dict[str, bool]) -> None:
    """Merges, the ids of special tokens, the chat template, and which tokens frame a text (`add` where the files do
    not say)."""
    from gguf import SpecialVocab

    special = SpecialVocab(folder, load_merges=not (folder / "tokenizer.model").exists(), n_vocab=config["vocab_size"])
    for kind in ("bos", "eos", "pad"):
        token = config.get(f"{kind}_token_id")
        token = token[0] if isinstance(token, list) else token
        if token is not None:
            special.special_token_ids.setdefault(kind, token)
    special.add_special_token = add | special.add_special_token
    special.add_to_gguf(writer, quiet=True)
