"""The files are written here as llama.cpp's converter writes them, by code of their own; transformers' reader and the
models that they came from are the references."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tolerances import LOGITS
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import ropex
from ropex.config import rope_of
from ropex.convert.convert import convert
from ropex.convert.inspect import inspect
from ropex.convert.read_gguf import gguf_header, read_gguf
from ropex.convert.source import every
from ropex.errors import CheckpointError, UnsupportedError
from ropex.tables import table

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
QWEN = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.fixture
def make(make_model, make_config):
    def one(kind: str, **changes):
        if kind == "llama":
            return make_model(**changes)
        config, model = QWEN[kind]
        base = make_config().to_dict()
        keep = set(base) - {"model_type", "architectures", "attention_bias", "transformers_version"}
        built = model(config(**{k: base[k] for k in keep} | changes)).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.normal_(0, 0.25)
        return built

    return one


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute: half-split rows to interleaved."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(path, model, keys=(), extra=(), drop=(), dtype="F32", arch=None, kv_heads_of_k=2):
    """keys: (name, value) behind the architecture. extra: (name, float32 array)."""
    config = model.config
    arch = arch or config.model_type
    writer = GGUFWriter(path, arch)
    numbers = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size, "rope.freq_base": 500000.0, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    for key, value in (numbers | dict(keys)).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for theirs, tensor in model.state_dict().items():
        if theirs in drop or theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if arch == "llama" and (".q_proj" in theirs or ".k_proj" in theirs):
            array = permuted(array, 8 if ".q_proj" in theirs else kv_heads_of_k)
        module, kind = theirs.rsplit(".", 1)
        layer, name = module.split(".", 3)[2:] if ".layers." in module else (None, module)
        name = f"blk.{layer}.{NAMES[name]}.{kind}" if layer is not None else f"{NAMES[name]}.{kind}"
        if array.ndim == 1 or dtype == "F32":
            writer.add_tensor(name, array)
        elif dtype == "F16":
            writer.add_tensor(name, array.astype(np.float16))
        else:
            kind = GGMLQuantizationType[dtype]
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    for name, array in extra:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_the_models_and_transformers_own(make, tmp_path, kind, tied):
    model = make(kind, tie_word_embeddings=tied)
    source = read_gguf(write(tmp_path / "m.gguf", model))
    found = dict(source.tensors(every))
    theirs = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)["tensors"]
    state = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    assert found.keys() == state.keys()
    assert all(torch.equal(found[n], state[n]) and torch.equal(found[n], theirs[n]) for n in found)
    assert source.config["tie_word_embeddings"] is tied and source.bytes == sum(4 * t.numel() for t in found.values())


@pytest.mark.parametrize(("kind", "biases"), [("llama", True), ("llama", False), ("qwen3", True)])
def test_biases_of_q_and_k_are_permuted_with_their_weights(make, tmp_path, kind, biases):
    model = make(kind, attention_bias=biases, **({"mlp_bias": biases} if kind == "llama" else {}))
    source = read_gguf(write(tmp_path / "m.gguf", model))
    state = model.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in source.tensors(every))
    assert source.config["attention_bias"] is biases and ("model.layers.0.self_attn.q_proj.bias" in state) is biases


def test_k_permuted_with_the_query_heads_count_would_show(make, tmp_path):
    """RX-01, RX-12."""
    model = make("llama")
    source = read_gguf(write(tmp_path / "m.gguf", model, kv_heads_of_k=8))
    name = "model.layers.0.self_attn.k_proj.weight"
    assert not torch.equal(dict(source.tensors(lambda n: n == name))[name], model.state_dict()[name])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_the_converted_folder_gives_the_models_logits(make, tmp_path, tokens, kind):
    model = make(kind)
    convert(write(tmp_path / "m.gguf", model), tmp_path / "out", "rope")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(stock) is type(model) and stock.generation_config.eos_token_id == 2
    assert torch.equal(stock(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)]
)
def test_half_types_stay_and_quantised_ones_become_float32(make, tmp_path, dtype, expected):
    model = make("llama")
    source = read_gguf(write(tmp_path / "m.gguf", model, dtype=dtype))
    theirs = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)["tensors"]
    for name, tensor in source.tensors(every):
        assert tensor.dtype == (torch.float32 if tensor.ndim == 1 else expected)
        assert torch.equal(tensor.float(), theirs[name])
    assert source.config["dtype"] == str(expected).removeprefix("torch.")
    assert inspect(tmp_path / "m.gguf")["dtype"] == dtype


@torch.no_grad()
def test_rope_freqs_become_longrope_factors(make, tmp_path, tokens):
    """Llama 3.1's table as llama.cpp's converter writes it."""
    llama3 = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    model = make("llama", rope_parameters=llama3)
    expected = table("rope", rope_of(model.config.to_dict()), {}).theta
    plain = 500000.0 ** -(torch.arange(8) / 8).double()
    factors = (plain / expected.double()).float().numpy()
    assert factors.max() == pytest.approx(8)
    file = write(tmp_path / "m.gguf", model, extra=[("rope_freqs.weight", factors)])
    block = read_gguf(file).config["rope_parameters"]
    assert block["long_factor"] == block["short_factor"] == factors.tolist()
    assert block["attention_factor"] == 1 and block["original_max_position_embeddings"] == 128
    convert(file, tmp_path / "out", "rope")
    logits = ropex.load(tmp_path / "out")(tokens).logits
    assert (logits - model(tokens).logits).abs().max() <= LOGITS
    with pytest.raises(UnsupportedError, match="ropex convert .* --to rope"):
        ropex.load(file)  # transformers would drop them


@pytest.mark.parametrize(
    ("keys", "block"),
    [
        ({}, {"rope_type": "default", "rope_theta": 500000.0}),
        ({"type": "none", "factor": 4.0}, {"rope_type": "default", "rope_theta": 500000.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 1.25},
            {"rope_type": "yarn", "original_max_position_embeddings": 32, "attention_factor": 1.25 * 1.138629436111989},
        ),
        ({"attn_factor": 1.5}, {"rope_type": "longrope", "long_factor": [1.0] * 8, "attention_factor": 1.5}),
        ({"factor": 2.0, "attn_factor": 1.5}, {"rope_type": "longrope", "short_factor": [2.0] * 8}),
    ],
)
def test_rope_scaling_is_read(make, tmp_path, keys, block):
    file = write(tmp_path / "m.gguf", make("llama"), keys={f"rope.scaling.{k}": v for k, v in keys.items()})
    config = gguf_header(file).config
    assert {k: config["rope_parameters"][k] for k in block} == block
    assert rope_of(config).rope_theta == 500000.0  # both spellings agree


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "longrope"},
        {"rope.scaling.yarn_log_multiplier": 0.1},
        {"expert_count": 8},
        {"rope.dimension_count": 8},
        {"attention.value_length": 32},
    ],
)
def test_what_no_config_can_say_is_refused(make, tmp_path, keys):
    with pytest.raises(UnsupportedError):
        read_gguf(write(tmp_path / "m.gguf", make("llama"), keys=keys))


def test_yarn_keys_are_refused_by_load_and_read_by_convert(make, tmp_path):
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    file = write(tmp_path / "m.gguf", make("qwen2"), keys=keys)
    with pytest.raises(UnsupportedError, match="--to rope"):
        ropex.load(file)
    convert(file, tmp_path / "out", "rope")
    assert inspect(tmp_path / "out")["method"] == inspect(file)["method"] == "yarn"


def test_other_architectures_are_refused_by_name(make, tmp_path):
    with pytest.raises(UnsupportedError, match="'gemma2'.*Hugging Face checkpoint"):
        read_gguf(write(tmp_path / "m.gguf", make("llama"), arch="gemma2"))


def test_one_part_of_several_is_refused(make, tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="one of 3 parts"):
        read_gguf(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(make, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"lacks the tensor blk\.1\.ffn_up\.weight"):
        read_gguf(write(tmp_path / "m.gguf", make("llama"), drop=[name]))


def test_an_unknown_tensor_is_named(make, tmp_path):
    extra = [("rope_factors_long.weight", np.ones(8, np.float32))]
    with pytest.raises(UnsupportedError, match="rope_factors_long.weight"):
        read_gguf(write(tmp_path / "m.gguf", make("llama"), extra=extra))


def test_a_file_cut_anywhere_is_an_error_of_one_line(make, tmp_path):
    """RX-46."""
    whole = write(tmp_path / "m.gguf", make("llama")).read_bytes()
    lengths = [*range(0, 4000, 37), *range(4000, len(whole) - 32, len(whole) // 40)]
    for length in lengths:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        for opened in (read_gguf, ropex.load):
            with pytest.raises(CheckpointError, match="not a whole GGUF file") as error:
                opened(tmp_path / "cut.gguf")
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n" * 9, b"GGUF" + b"\xff" * 400])
def test_what_is_no_gguf_is_an_error_of_one_line(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a whole GGUF file") as error:
        read_gguf(tmp_path / "m.gguf")
    assert "\n" not in str(error.value)


def test_inspect_tells_the_pairing_by_architecture(make, tmp_path):
    for kind, pairing in (("llama", "interleaved"), ("qwen2", "half-split"), ("qwen3", "half-split")):
        model = make(kind)
        facts = inspect(write(tmp_path / f"{kind}.gguf", model))
        expected = {"family": kind, "heads": 8, "kv_heads": 2, "head_dim": 16, "pairing": pairing, "window": 128}
        assert {k: facts[k] for k in expected} == expected and bool(facts["notes"]) is (kind == "llama")
        assert facts["parameters"] == sum(p.numel() for p in model.parameters())


def test_the_header_is_read_without_torch(make, tmp_path):
    file = write(tmp_path / "m.gguf", make("llama"), extra=[("rope_freqs.weight", np.ones(8, np.float32))])
    script = f"import sys; from ropex.convert.inspect import inspect; inspect({str(file)!r})\n"
    script += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_memory_is_bounded_by_a_tensor(make, tmp_path):
    source = read_gguf(write(tmp_path / "m.gguf", make("llama", num_hidden_layers=24, hidden_size=256), dtype="Q8_0"))
    largest = max(t.numel() * 4 for _, t in source.tensors(every))
    tracemalloc.start()
    for _ in source.tensors(every):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * largest < source.bytes / 10
