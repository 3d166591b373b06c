import json

import pytest
import torch
from sources import built

from ropex.config import rope_of
from ropex.convert.read_meta import read_meta, trained_window
from ropex.convert.source import every
from ropex.errors import CheckpointError, UnsupportedError

META = {
    "attention.wq": ("self_attn.q_proj", 0), "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0), "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0), "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None), "ffn_norm": ("post_attention_layernorm", None),
}  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows f and f + d/2 of each head, side by side: Meta's order, written without ropex's index maps."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def save_meta(model, path, parts: int = 1, words_split: int = 1, k_heads: int | None = None, **params):
    """The model as Meta lays it out. k_heads: permute k with another count of heads, which is wrong."""
    config, state = model.config, {n: t.detach() for n, t in model.state_dict().items()}
    whole = {
        "tok_embeddings.weight": (state["model.embed_tokens.weight"], words_split),
        "norm.weight": (state["model.norm.weight"], None),
        "output.weight": (state["lm_head.weight"], 0),
        "rope.freqs": (torch.ones(8), None),
    }
    for layer in range(config.num_hidden_layers):
        for theirs, (ours, split) in META.items():
            tensor = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs == "attention.wq":
                tensor = interleaved(tensor, config.num_attention_heads)
            if theirs == "attention.wk":
                tensor = interleaved(tensor, k_heads or config.num_key_value_heads)
            whole[f"layers.{layer}.{theirs}.weight"] = tensor, split
    path.mkdir()
    for part in range(parts):
        torch.save(
            {n: (t if split is None else t.chunk(parts, split)[part].clone()) for n, (t, split) in whole.items()},
            path / f"consolidated.{part:02d}.pth",
        )
    said = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": -1,
        "multiple_of": 256,
        "ffn_dim_multiplier": 1.3,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": 500000.0,
    }
    said = {k: v for k, v in (said | params).items() if v is not None}
    (path / "params.json").write_text(json.dumps(said))
    return path


@pytest.fixture
def even(make_model):
    """Parts divide its vocabulary, and its head_dim is dim / n_heads, as in Meta's own."""
    return make_model(hidden_size=128, vocab_size=96)


@pytest.mark.parametrize(("parts", "words_split"), [(1, 1), (2, 1), (2, 0)])
def test_a_folder_of_metas_is_the_model_that_it_was_made_from(tmp_path, even, parts, words_split):
    """Parts split the words by channel (Llama 2) or by word (Llama 3)."""
    tokens = torch.randint(3, 96, (2, 200), generator=torch.Generator().manual_seed(1))
    source = read_meta(save_meta(even, tmp_path / "meta", parts, words_split, head_dim=None))
    read = dict(source.tensors(every))
    assert read.keys() == even.state_dict().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in even.state_dict().items())
    assert torch.equal(built(source, tmp_path / "out")(tokens).logits, even(tokens).logits)


def test_a_stated_head_dim_is_believed(tmp_path, model, tokens):
    """RX-01: 8 heads of 16 channels on 64."""
    source = read_meta(save_meta(model, tmp_path / "meta"))
    assert torch.equal(built(source, tmp_path / "out")(tokens).logits, model(tokens).logits)


def test_a_wrong_count_of_key_heads_shows(tmp_path, model, tokens):
    """RX-01: these heads would reveal a k_proj that was permuted as if it had as many heads as q_proj."""
    source = read_meta(save_meta(model, tmp_path / "meta", k_heads=8))
    assert (built(source, tmp_path / "out")(tokens).logits - model(tokens).logits).abs().max() > 0.1


def test_one_head_count_for_all_is_the_default(tmp_path, make_model, tokens):
    model = make_model(num_key_value_heads=8)
    source = read_meta(save_meta(model, tmp_path / "meta", n_kv_heads=None))
    assert source.config["num_key_value_heads"] == 8
    assert torch.equal(built(source, tmp_path / "out")(tokens).logits, model(tokens).logits)


def test_only_wanted_tensors_are_joined(tmp_path, even, monkeypatch):
    source = read_meta(save_meta(even, tmp_path / "meta", 2))
    joined = []
    monkeypatch.setattr("torch.cat", lambda tensors, dim, cat=torch.cat: joined.append(1) or cat(tensors, dim))
    assert [n for n, _ in source.tensors(lambda n: "layers.2.mlp.down" in n)] == ["model.layers.2.mlp.down_proj.weight"]
    assert len(joined) == 1


def test_the_config_says_everything_in_both_spellings(tmp_path, model):
    config = read_meta(save_meta(model, tmp_path / "meta", rope_theta=None)).config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0  # absent means 10000
    assert config["intermediate_size"] == 96 and config["vocab_size"] == 97
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "float32"
    rope = rope_of(config)
    assert (rope.heads, rope.kv_heads, rope.head_dim, rope.pairing) == (8, 2, 16, "half-split")


@pytest.mark.parametrize(("stated", "factor"), [({}, 8.0), ({"rope_scale_factor": 32}, 32.0)])
def test_scaled_rope_is_llama3s(tmp_path, model, stated, factor):
    source = read_meta(save_meta(model, tmp_path / "meta", use_scaled_rope=True, **stated))
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    rope = rope_of(source.config)
    assert rope.rope_type == "llama3" and rope.scaling == scaling and rope.max_position_embeddings == 131072
    assert source.config["rope_scaling"] == {"rope_type": "llama3"} | scaling


def test_a_head_that_is_the_words_again_is_tied(tmp_path, make_model, tokens):
    """RX-30: Llama 3.2's 1B and 3B, whose scaling has a factor of its own."""
    model = make_model(tie_word_embeddings=True)
    source = read_meta(save_meta(model, tmp_path / "meta"))
    assert source.config["tie_word_embeddings"] and "lm_head.weight" not in dict(source.tensors(every))
    assert torch.equal(built(source, tmp_path / "out")(tokens).logits, model(tokens).logits)
    scaled = read_meta(save_meta(model, tmp_path / "scaled", use_scaled_rope=True))
    assert rope_of(scaled.config).scaling["factor"] == 32.0


@pytest.mark.parametrize(
    ("params", "window"),
    [
        ({"max_seq_len": 2048, "use_scaled_rope": True}, 2048),
        ({"use_scaled_rope": True, "rope_theta": 500000.0}, 131072),
        ({"rope_theta": 500000.0}, 8192),
        ({"rope_theta": 1000000}, 16384),
        ({}, 4096),
    ],
)
def test_the_trained_window_follows_one_rule(params, window):
    assert trained_window(params) == window


def test_the_window_is_guessed_aloud_and_can_be_given(tmp_path, model):
    folder = save_meta(model, tmp_path / "meta")
    assert "8192" in read_meta(folder).notes[0]
    given = read_meta(folder, window=128)
    assert given.config["max_position_embeddings"] == 128 and not given.notes
    with pytest.raises(CheckpointError, match="--window"):
        trained_window({"rope_theta": 123456.0})


def test_other_files_are_carried_without_params(tmp_path, model):
    folder = save_meta(model, tmp_path / "meta")
    for name in ("tokenizer.model", "LICENSE", "checklist.chk"):
        (folder / name).write_text("x")
    (tmp_path / "out").mkdir()
    read_meta(folder).carry(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"tokenizer.model", "LICENSE"}


@pytest.mark.parametrize("gone", ["consolidated.00.pth", "consolidated.01.pth"])
def test_a_missing_part_is_an_error(tmp_path, even, gone):
    """RX-31: the last part's absence shows in the shapes alone."""
    folder = save_meta(even, tmp_path / "meta", 2, head_dim=None)
    (folder / gone).unlink()
    with pytest.raises(CheckpointError, match="no consolidated.00.pth|a part is missing"):
        read_meta(folder)


def edit_part(folder, edit):
    part = torch.load(folder / "consolidated.00.pth")
    edit(part)
    torch.save(part, folder / "consolidated.00.pth")


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda p: p.pop("layers.1.attention.wk.weight"), CheckpointError, "lacks layers.1.attention.wk.weight"),
        (lambda p: p.pop("tok_embeddings.weight"), CheckpointError, "lacks tok_embeddings.weight"),
        (lambda p: p.update({"norm.weight": torch.ones(3)}), CheckpointError, r"norm.weight .*\[3\].*\[64\]"),
        (lambda p: p.update({"tok_embeddings.weight": torch.ones(97)}), CheckpointError, "tok_embeddings"),
        (lambda p: p.update({"layers.0.attention.wq.bias": torch.ones(3)}), UnsupportedError, "wq.bias"),
        (lambda p: p.update({"layers.3.attention.wq.weight": torch.ones(3)}), UnsupportedError, "layers.3"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, model, edit, error, message):
    folder = save_meta(model, tmp_path / "meta")
    edit_part(folder, edit)
    with pytest.raises(error, match=message):
        read_meta(folder)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"dim": None}, CheckpointError, "dim is None"),
        ({"n_heads": "8"}, CheckpointError, "n_heads is '8'"),
        ({"n_kv_heads": 8}, CheckpointError, "attention.wk"),
        ({"vocab_size": 98}, CheckpointError, "vocab_size is 98"),
        ({"rope_theta": "big"}, CheckpointError, "rope_theta"),
        ({"moe": {"num_experts": 8}}, UnsupportedError, "moe"),
        ({"sliding_window": 4096}, UnsupportedError, "sliding_window"),
    ],
)
def test_params_that_cannot_be_are_named(tmp_path, model, params, error, message):
    with pytest.raises(error, match=message):
        read_meta(save_meta(model, tmp_path / "meta", **params))
