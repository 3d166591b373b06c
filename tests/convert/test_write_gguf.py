import json
import tracemalloc

import pytest
import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import ropex
from ropex.config import rope_of, write_rope
from ropex.convert.convert import convert
from ropex.convert.read_gguf import read_gguf
from ropex.convert.source import every, open_source
from ropex.convert.write_gguf import PRE_TOKENIZERS, write_gguf
from ropex.errors import CheckpointError, UnsupportedError
from ropex.tables import METHODS, resolve_params, table

FAMILIES = {
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"hidden_size": 128}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 128}),  # all that transformers' GGUF reader knows
}


@pytest.fixture
def saved(make_model, make_config, tmp_path):
    """A random model and its folder."""

    def save(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes):
        if kind == "llama":
            model = make_model(**changes)
        else:
            config, cls, own = FAMILIES[kind]
            base = make_config().to_dict()
            names = {"model_type", "architectures", "attention_bias", "transformers_version"}
            model = cls(config(**{k: v for k, v in base.items() if k not in names} | own | changes)).eval()
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0, 0.25)
        model.to(dtype).save_pretrained(tmp_path / kind)
        return model, tmp_path / kind

    return save


def written(folder, out, source_gguf=None, **changes):
    source = open_source(folder)
    write_gguf(source.config | changes, source.tensors(every), folder, out, source_gguf)
    return out


def config_of(model, block=None) -> dict:
    config = model.config.to_dict()
    return write_rope(config, block or config["rope_parameters"])


def through_transformers(file):
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_a_folder_comes_back_from_gguf_with_equal_tensors_and_logits(saved, tmp_path, tokens, kind):
    model, folder = saved(kind)
    file = written(folder, tmp_path / "m.gguf")
    state = model.state_dict()
    found = dict(read_gguf(file).tensors(every))
    assert found.keys() == state.keys() and all(torch.equal(found[n], state[n]) for n in found)
    convert(file, tmp_path / "back", "rope")
    assert torch.equal(ropex.load(tmp_path / "back")(tokens).logits, model(tokens).logits)
    assert not file.with_name("m.gguf.part").exists()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_transformers_own_reader_gets_the_same_model(saved, tmp_path, tokens, kind):
    """An independent reader; 8 and 2 heads, so that a wrong count would show (RX-01)."""
    model, folder = saved(kind)
    theirs = through_transformers(written(folder, tmp_path / "m.gguf"))
    assert torch.equal(theirs(tokens).logits, model(tokens).logits)


@torch.no_grad()
def test_biases_travel(saved, tmp_path, tokens):
    model, folder = saved(attention_bias=True, mlp_bias=True)
    convert(written(folder, tmp_path / "m.gguf"), tmp_path / "back", "rope")
    assert torch.equal(ropex.load(tmp_path / "back")(tokens).logits, model(tokens).logits)


@torch.no_grad()
def test_a_tied_head_is_written_once(saved, tmp_path, tokens):
    model, folder = saved(tie_word_embeddings=True)
    state = model.state_dict()
    write_gguf(config_of(model), state.items(), folder, tmp_path / "m.gguf", None)
    assert "output.weight" not in {t.name for t in GGUFReader(tmp_path / "m.gguf").tensors}
    assert torch.equal(through_transformers(tmp_path / "m.gguf")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_keep_their_dtype_and_norms_are_float32(saved, tmp_path, dtype):
    model, folder = saved(dtype=dtype)
    file = written(folder, tmp_path / "m.gguf")
    state = model.state_dict()
    for name, tensor in read_gguf(file).tensors(every):
        assert tensor.dtype == (torch.float32 if tensor.ndim == 1 else dtype)
        assert torch.equal(tensor.to(dtype), state[name])
    assert GGUFReader(file).get_field("general.file_type").contents() == {torch.bfloat16: 32, torch.float16: 1}[dtype]


def test_the_metadata_is_complete(saved, tmp_path):
    fields = GGUFReader(written(saved()[1], tmp_path / "m.gguf")).fields
    expected = {
        "general.architecture": "llama", "general.name": "m", "general.file_type": 0, "llama.context_length": 128,
        "llama.embedding_length": 64, "llama.block_count": 3, "llama.feed_forward_length": 96,
        "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2, "llama.attention.key_length": 16,
        "llama.attention.value_length": 16, "llama.rope.freq_base": 500000.0, "llama.rope.dimension_count": 16,
        "llama.vocab_size": 97, "tokenizer.ggml.model": "no_vocab",
    }  # fmt: skip
    assert {k: fields[k].contents() for k in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"].contents() == pytest.approx(1e-6)
    assert not any("rope.scaling" in key for key in fields)


TABLES = {
    "ntk": {}, "pi": {}, "yarn": {}, "llama3": {}, "half-rope": {}, "rope-id": {}, "high-freq": {}, "nope": {},
    "p-rope": {}, "longrope": {"long_factor": [1.0 + f / 3 for f in range(8)]},
    "yarn, own bounds": {"beta_fast": 8.0, "beta_slow": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
@torch.no_grad()
def test_a_shared_table_comes_back_to_one_ulp(saved, tmp_path, tokens, name):
    """RX-24. A pair at rest comes back with a frequency of 1e-30 at most, which is rest at every position."""
    method = name.split(",")[0]
    rope = rope_of(saved()[0].config.to_dict())
    block = METHODS[method].stock(rope, resolve_params(method, rope, 4.0, TABLES[name]))
    model, folder = saved(rope_parameters=block, max_position_embeddings=512)
    file = written(folder, tmp_path / "m.gguf")
    before, after = table("rope", rope_of(config_of(model)), {}), table("rope", rope_of(read_gguf(file).config), {})
    ulp = before.theta.nextafter(torch.tensor(torch.inf)) - before.theta
    assert ((before.theta - after.theta).abs() <= torch.maximum(ulp, torch.tensor(1e-30))).all()
    assert after.attention_factor == pytest.approx(before.attention_factor, rel=1e-7)
    has_factors = "rope_freqs.weight" in {t.name for t in GGUFReader(file).tensors}
    assert has_factors is (name not in ("ntk", "pi", "yarn"))
    convert(file, tmp_path / "back", "rope")
    logits = model(tokens).logits
    assert (ropex.load(tmp_path / "back")(tokens).logits - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize(("method", "asked"), [("yarn", 1.5), ("longrope", 1.25)])
def test_an_attention_factor_is_kept(saved, tmp_path, method, asked):
    """What llama.cpp multiplies by itself under YaRN is taken out."""
    rope = rope_of(saved()[0].config.to_dict())
    params = {"attention_factor": asked} | ({"long_factor": [1.0] * 8} if method == "longrope" else {})
    block = METHODS[method].stock(rope, resolve_params(method, rope, 4.0, params))
    file = written(saved(rope_parameters=block, max_position_embeddings=512)[1], tmp_path / "m.gguf")
    own = 1.138629436111989 if method == "yarn" else 1.0
    assert GGUFReader(file).get_field("llama.rope.scaling.attn_factor").contents() == pytest.approx(asked / own)
    after = table("rope", rope_of(read_gguf(file).config), {})
    assert after.attention_factor == pytest.approx(asked, rel=1e-7)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_takes_scaling_keys_and_no_factors(saved, tmp_path, kind):
    """llama.cpp passes no factors to qwen's rotation, and refuses a file with a tensor that it does not use."""
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
    file = written(saved(kind, rope_parameters=yarn, max_position_embeddings=512)[1], tmp_path / "m.gguf")
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    assert {k: GGUFReader(file).get_field(f"{kind}.rope.scaling.{k}").contents() for k in keys} == keys
    block = {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedError, match="export as safetensors"):
        written(saved(kind, rope_parameters=block)[1], tmp_path / "n.gguf")


def test_heads_of_their_own_are_refused_with_the_way_out(saved, tmp_path):
    """RX-24: nothing reverts to the base frequencies in silence."""
    _, folder = saved()
    convert(folder, tmp_path / "ada", "adarope", init="yarn", factor=2.0)
    with pytest.raises(UnsupportedError, match="frequencies.*every head.*safetensors.*--share-heads"):
        written(tmp_path / "ada", tmp_path / "m.gguf")
    convert(folder, tmp_path / "id", "rope-id")
    with pytest.raises(UnsupportedError, match="grows with the length.*--bake-length.*--no-scale"):
        written(tmp_path / "id", tmp_path / "m.gguf")
    assert not list(tmp_path.glob("m.gguf*"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gemma2"}, "not of 'gemma2'"),
        ({"model_type": "cohere"}, "not of 'cohere'"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "mistral", "sliding_window": 64}, "looks back 64 tokens"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "looks back 64 tokens"),
        ({"model_type": "qwen2"}, "hidden_size / num_attention_heads"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(saved, tmp_path, changes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        written(saved()[1], tmp_path / "m.gguf", **changes)


@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 4.0},
        {"rope_type": "longrope", "rope_theta": 5e5, "long_factor": [4.0] * 8, "short_factor": [1.0] * 8},
    ],
)
def test_a_table_that_llama_cpp_cannot_have_is_refused(saved, tmp_path, block):
    model, folder = saved()
    with pytest.raises(UnsupportedError, match="export as safetensors"):
        write_gguf(config_of(model, block), model.state_dict().items(), folder, tmp_path / "m.gguf", None)


def test_tensors_that_lack_or_do_not_belong_are_named(saved, tmp_path):
    model, folder = saved()
    state = model.state_dict()
    for names, found in (
        ([n for n in state if n != "model.norm.weight"], "lacks the tensor model.norm.weight"),
        ([*state, "model.norm.weight"], "model.norm.weight is twice there"),
        ([*state, "model.layers.0.self_attn.sinks"], "model.layers.0.self_attn.sinks"),
    ):
        tensors = [(n, state.get(n, state["model.norm.weight"])) for n in names]
        with pytest.raises(CheckpointError, match=found):
            write_gguf(config_of(model), tensors, folder, tmp_path / "m.gguf", None)
    with pytest.raises(UnsupportedError, match="float64.*--dtype"):
        write_gguf(config_of(model), [(n, t.double()) for n, t in state.items()], folder, tmp_path / "m.gguf", None)


def test_memory_is_bounded_by_a_few_tensors(make_config, tmp_path):
    config = make_config(num_hidden_layers=24, hidden_size=256, intermediate_size=512).to_dict()
    shapes = {"q_proj": (128, 256), "k_proj": (32, 256), "v_proj": (32, 256), "o_proj": (256, 128)}
    mlp = {"gate_proj": (512, 256), "up_proj": (512, 256), "down_proj": (256, 512)}

    def tensors():
        yield "model.embed_tokens.weight", torch.from_numpy(rng(97, 256))
        for layer in range(24):
            name = f"model.layers.{layer}"
            yield f"{name}.input_layernorm.weight", torch.from_numpy(rng(256))
            yield f"{name}.post_attention_layernorm.weight", torch.from_numpy(rng(256))
            for block, named in (("self_attn", shapes), ("mlp", mlp)):
                for module, shape in named.items():
                    yield f"{name}.{block}.{module}.weight", torch.from_numpy(rng(*shape))
        yield "model.norm.weight", torch.from_numpy(rng(256))
        yield "lm_head.weight", torch.from_numpy(rng(97, 256))

    def rng(*shape):  # numpy's memory is what tracemalloc sees
        import numpy as np

        return np.random.default_rng(0).standard_normal(shape, np.float32)

    write_gguf(config, tensors(), tmp_path, tmp_path / "warm.gguf", None)
    tracemalloc.start()
    write_gguf(config, tensors(), tmp_path, tmp_path / "m.gguf", None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * 4 * 512 * 256 < (tmp_path / "m.gguf").stat().st_size / 4


# --- tokenizers ---

TEXT = "it's I'LL we're 12345 tokens été déjà vu\n\n  x = 3;\t東京 привет 1 22 333\r\n" * 20


def byte_level(splits: tuple[str, ...], ignore_merges: bool = False) -> Tokenizer:
    """A byte-level BPE trained on TEXT, whose words are cut as PRE_TOKENIZERS says."""
    steps: list = []
    for pattern in splits:
        if pattern == "digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif pattern:
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits[-1] == ""))
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>", "<|user|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def with_tokenizer(saved, tokenizer: Tokenizer, rows: int = 400):
    _, folder = saved(vocab_size=rows)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(folder)
    return fast, folder


@pytest.mark.parametrize(("key", "pre"), PRE_TOKENIZERS.items(), ids=list(PRE_TOKENIZERS.values()))
def test_a_byte_level_tokenizer_is_translated(saved, tmp_path, key, pre):
    fast, folder = with_tokenizer(saved, byte_level(*key))
    file = written(folder, tmp_path / "m.gguf")
    fields = {k.removeprefix("tokenizer."): f.contents() for k, f in GGUFReader(file).fields.items()}
    assert (fields["ggml.model"], fields["ggml.pre"]) == ("gpt2", pre)
    assert (fields["ggml.bos_token_id"], fields["ggml.eos_token_id"], fields["ggml.add_bos_token"]) == (0, 1, False)
    assert fields["chat_template"] == "{{ messages }}"
    tokens, types = fields["ggml.tokens"], fields["ggml.token_type"]
    assert len(tokens) == len(types) == 400  # llama.cpp counts the embedding's rows by them
    assert tokens[: len(fast)] == fast.convert_ids_to_tokens(range(len(fast))) and types[399] == 5  # unused
    assert [types[tokens.index(t)] for t in ("<s>", "<|user|>", "<think>", "a")] == [3, 3, 4, 1]
    if pre != "smollm":  # whose digits transformers' own reader does not split
        back = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        assert back.encode(TEXT, add_special_tokens=False) == fast.encode(TEXT, add_special_tokens=False)


@pytest.mark.parametrize("splits", [(r"\w+",), ("digits", r"\w+"), (r" ?\p{L}+", "")])
def test_an_unknown_way_to_split_text_is_refused(saved, tmp_path, splits):
    _, folder = with_tokenizer(saved, byte_level(splits))
    with pytest.raises(UnsupportedError, match="not known to be llama.cpp's.*convert_hf_to_gguf") as error:
        written(folder, tmp_path / "m.gguf")
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(saved, tmp_path):
    _, folder = with_tokenizer(saved, byte_level(("",)), rows=300)
    with pytest.raises(CheckpointError, match="embedding 300 rows"):
        written(folder, tmp_path / "m.gguf")


def test_a_gguf_sources_tokenizer_is_copied_word_for_word(saved, tmp_path):
    _, folder = with_tokenizer(saved, byte_level(("digits", "")))
    first = written(folder, tmp_path / "a.gguf")
    (tmp_path / "bare").mkdir()
    source = open_source(first)
    write_gguf(source.config, source.tensors(every), tmp_path / "bare", tmp_path / "b.gguf", first)
    one, two = (
        {k: (f.types, f.contents()) for k, f in GGUFReader(file).fields.items() if k.startswith("tokenizer.")}
        for file in (first, tmp_path / "b.gguf")
    )
    assert one == two and len(one) > 6
    with pytest.raises(CheckpointError, match="400 tokens, and the embedding 401 rows"):
        write_gguf(source.config | {"vocab_size": 401}, [], tmp_path / "bare", tmp_path / "c.gguf", first)


def test_a_sentencepiece_tokenizer_is_translated(saved, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    _, folder = saved(vocab_size=400)
    (tmp_path / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    added = [{"id": 340, "content": "<think>", "special": False}, {"id": 341, "content": "<|user|>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {}}))
    fields = {k: f.contents() for k, f in GGUFReader(written(folder, tmp_path / "m.gguf")).fields.items()}
    vocab = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    types = fields["tokenizer.ggml.token_type"]
    assert fields["tokenizer.ggml.model"] == "llama" and len(tokens) == len(scores) == len(types) == 400
    assert tokens[:342] == [vocab.id_to_piece(i) for i in range(340)] + ["<think>", "<|user|>"]
    assert scores[300] == vocab.get_score(300) and types[:4] == [2, 3, 3, 6] and types[340:343] == [4, 3, 5]


def test_a_tokenizer_that_lacks_its_sentencepiece_model_is_refused(saved, tmp_path):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    _, folder = with_tokenizer(saved, tokenizer)
    with pytest.raises(UnsupportedError, match="tokenizer.model"):
        written(folder, tmp_path / "m.gguf")
