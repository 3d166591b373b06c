"""What differs between architectures, from the outside: tables by layer, partial heads, norms, experts, refusals."""

import json
import sys
from pathlib import Path

import pytest
import torch
from families import THETA, tiny
from safetensors.torch import load_file, save_file
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

from ropex import load
from ropex.convert.convert import convert
from ropex.convert.export import export
from ropex.convert.inspect import inspect
from ropex.errors import CheckpointError, OptionError, UnsupportedError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def saved(tmp_path):
    def save(name, **changes):
        model = tiny(name, **changes)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name, model

    return save


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_the_page_of_families_is_the_registry():
    sys.path.insert(0, str(ROOT / "scripts"))
    from make_families import page

    assert (ROOT / "docs" / "families.md").read_text() == page() + "\n"


# --- two tables by layer type (RX-26) --------------------------------------------------------------------------------


def test_inspect_lists_base_factor_and_window_by_layer(saved):
    path, _ = saved("gemma3_text")
    facts = inspect(path)
    assert (facts["rope_theta"], facts["rope"]["type"], facts["rope"]["factor"]) == (THETA, "linear", 8.0)
    assert facts["turning"] == [5]
    assert facts["local"] == {
        "layers": [0, 1, 2, 3, 4], "window": 64, "rope_theta": 20_000.0, "rope": {"type": "default"}
    }  # fmt: skip


@pytest.mark.parametrize("spelling", ["nested", "flat"])
def test_both_spellings_of_two_tables_say_the_same(saved, edit_config, spelling):
    path, _ = saved("gemma3_text")
    if spelling == "flat":
        scaling = {"rope_type": "linear", "factor": 8.0}
        edit_config(path, ("rope_parameters",), rope_theta=THETA, rope_local_base_freq=20_000.0, rope_scaling=scaling)
    facts = inspect(path)
    assert (facts["rope_theta"], facts["rope"]["factor"], facts["local"]["rope_theta"]) == (THETA, 8.0, 20_000.0)


@torch.no_grad()
def test_sliding_layers_stay_unless_asked_for(saved, tmp_path, tokens):
    path, model = saved("olmo3")
    convert(path, tmp_path / "yarn", "yarn", factor=4.0)
    before, after = config_of(path)["rope_parameters"], config_of(tmp_path / "yarn")["rope_parameters"]
    assert after["sliding_attention"] == before["sliding_attention"]
    assert after["full_attention"]["rope_type"] == "yarn" and config_of(tmp_path / "yarn")["sliding_window"] == 64
    convert(path, tmp_path / "both", "yarn", factor=4.0, sliding=True)
    assert config_of(tmp_path / "both")["rope_parameters"]["sliding_attention"]["rope_type"] == "yarn"
    outs = [load(p)(tokens).logits for p in (path, tmp_path / "yarn", tmp_path / "both")]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "both").eval()(tokens).logits
    assert torch.equal(stock, outs[2]) and not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    convert(path, tmp_path / "ada", "adarope", sliding=True)
    converted = load(tmp_path / "ada")
    assert torch.equal(converted(tokens).logits, outs[0])
    assert sum(hasattr(m, "adarope") for m in converted.modules()) == 4


def test_sliding_layers_cannot_be_asked_for_where_all_share_a_table(folder, tmp_path):
    with pytest.raises(OptionError, match="no layer of this checkpoint has a table"):
        convert(folder, tmp_path / "out", "adarope", sliding=True)


# --- partial rotary (RX-15) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rotary_dim"), [("gpt_neox", 8), ("glm", 8), ("phi", 8), ("stablelm", 8)])
def test_inspect_reports_rotary_width_and_pair_offset(saved, name, rotary_dim):
    path, _ = saved(name)
    facts = inspect(path)
    assert (facts["head_dim"], facts["rotary_dim"]) == (16, rotary_dim)
    assert facts["pair_offset"] == (1 if name == "glm" else rotary_dim // 2)


@pytest.mark.parametrize("name", ["glm", "gpt_neox", "stablelm", "qwen3_next"])
@torch.no_grad()
def test_the_familys_own_share_counts_where_the_config_is_silent(saved, edit_config, tokens, tmp_path, name):
    path, _ = saved(name, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    config = config_of(path)
    edit_config(path, ("rope_parameters", "partial_rotary_factor", "rotary_pct"), rope_theta=THETA)
    if name == "gpt_neox":
        edit_config(path, ("rope_theta",), rotary_emb_base=THETA)
    assert inspect(path)["rotary_dim"] == 16 * config["rope_parameters"]["partial_rotary_factor"]
    assert inspect(path)["rope_theta"] == THETA
    convert(path, tmp_path / "ada", "adarope")
    stock = AutoModelForCausalLM.from_pretrained(path).eval()
    assert torch.equal(load(tmp_path / "ada")(tokens).logits, stock(tokens).logits)


@pytest.mark.parametrize("name", ["gpt_neox", "phi", "glm"])
@torch.no_grad()
def test_partial_heads_hold_far_past_the_window(saved, tmp_path, name):
    """O1 at positions >= 512, where an exponent taken from the head's width would show."""
    path, _ = saved(name, max_position_embeddings=1024)
    ids = torch.randint(3, 97, (1, 700), generator=torch.Generator().manual_seed(3))
    stock = AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits
    convert(path, tmp_path / "ada", "adarope")
    assert torch.equal(load(tmp_path / "ada")(ids).logits, stock)
    convert(path, tmp_path / "yarn", "yarn", factor=2.0)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn").eval()(ids).logits
    assert (load(f"{path}@yarn:2")(ids).logits - stock).abs().max() <= LOGITS


def test_rope_id_says_what_half_means_in_a_partial_head(saved, tmp_path):
    path, _ = saved("gpt_neox")
    result = convert(path, tmp_path / "id", "rope-id")
    assert any("8 of 16 channels turned before" in note for note in result["notes"])
    theta0 = load_file(tmp_path / "id" / "model-adarope.safetensors")["gpt_neox.layers.0.attention.adarope.theta0"]
    assert (theta0 > 0).tolist() == [True, True, False, False]


# --- norms between projection and rotation (RX-14) -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("llama", None),
        ("qwen3", "one weight for a head's channels, shared by all heads"),
        ("olmo2", "across all heads"),
        ("cohere", "a head each"),
        ("stablelm", "a head each"),
    ],
)
def test_inspect_tells_the_kind_of_norm_by_its_shape(saved, name, norms):
    path, _ = saved(name)
    assert inspect(path)["norms"] == norms


# --- longrope's two tables (RX-19) -----------------------------------------------------------------------------------


@pytest.fixture
def longrope(saved):
    block = {
        "rope_type": "longrope", "rope_theta": THETA, "short_factor": [1.0 + f / 8 for f in range(8)],
        "long_factor": [2.0 + f for f in range(8)], "original_max_position_embeddings": 64,
    }  # fmt: skip
    return saved("phi3", rope_parameters=block, original_max_position_embeddings=64)


def test_inspect_shows_both_tables_and_the_boundary(longrope):
    path, _ = longrope
    facts = inspect(path)
    assert len(facts["rope"]["short_factor"]) == len(facts["rope"]["long_factor"]) == 8
    assert any("short one up to 64 tokens" in note for note in facts["notes"])


@pytest.mark.parametrize(("table", "length"), [("short", 63), ("short", 64), ("long", 65), ("long", 80)])
@torch.no_grad()
def test_one_table_is_chosen_and_used_at_every_length(longrope, tmp_path, tokens, table, length):
    path, _ = longrope
    params = {} if table == "long" else {"table": table}  # long is the default
    result = convert(path, tmp_path / "ada", "adarope", params=params)
    assert any(f"the {table} one at every length" in note for note in result["notes"]) and not result["unchanged"]
    model, stock = load(tmp_path / "ada"), AutoModelForCausalLM.from_pretrained(path).eval()
    ids = tokens[:1, :length]
    assert (model(ids).logits - stock(ids).logits).abs().max() <= LOGITS
    full = model(tokens[:1, :80], use_cache=False).logits
    first = model(tokens[:1, :50], use_cache=True)
    second = model(tokens[:1, 50:80], cache=first.cache)
    assert (torch.cat((first.logits, second.logits), 1) - full).abs().max() <= LOGITS
    steps = model.generate(tokens[:1, :60], max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(model(steps).logits[:, 59:-1].argmax(-1), steps[:, 60:])


def test_factors_of_the_wrong_length_are_refused(longrope, edit_config):
    """RX-22."""
    path, _ = longrope
    block = config_of(path)["rope_parameters"]
    edit_config(path, rope_parameters=block | {"long_factor": [1.0] * 7})
    with pytest.raises(CheckpointError, match="long_factor has 7 numbers where the head has 8"):
        inspect(path)


# --- refused by name (RX-28, RX-16) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "glm_moe_dsa", "kv_lora_rank": 512, "rope_interleave": False}, "MLA"),
        ({"model_type": "falcon"}, "ropex knows"),
        ({"model_type": "bert"}, "encoder"),
        ({"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "sections"),
        ({"model_type": "gemma3", "text_config": {}}, "wraps a language model"),
        ({"model_type": "gpt_oss"}, "ropex knows"),
    ],
)
def test_other_architectures_are_refused_by_name_before_any_output(folder, tmp_path, edit_config, changes, reason):
    edit_config(folder, ("rope_parameters",), **changes)
    for call in (lambda: inspect(folder), lambda: convert(folder, tmp_path / "out", "adarope"), lambda: load(folder)):
        with pytest.raises(UnsupportedError, match=f"'{changes['model_type']}' is not supported.*{reason}"):
            call()
    assert not (tmp_path / "out").exists()


# --- experts and tied embeddings (RX-29, RX-30) ----------------------------------------------------------------------


def test_experts_that_straddle_shards_are_copied_under_their_names(tmp_path):
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path / "moe", max_shard_size="60KB")
    assert len(list((tmp_path / "moe").glob("*.safetensors"))) > 3
    convert(tmp_path / "moe", tmp_path / "ada", "adarope")
    export(tmp_path / "ada", tmp_path / "out")
    before = {n: t for f in (tmp_path / "moe").glob("*.safetensors") for n, t in load_file(f).items()}
    for folder in ("ada", "out"):
        after = {n: t for f in (tmp_path / folder).glob("*.safetensors") for n, t in load_file(f).items()}
        assert all(torch.equal(after[n], before[n]) for n in before)
        assert any(".experts.3." in n for n in after)


@torch.no_grad()
def test_tied_stays_tied_and_a_stored_head_is_carried_and_reported(saved, tmp_path, tokens):
    path, model = saved("qwen3")
    convert(path, tmp_path / "a", "adarope")
    names = set().union(*(load_file(f) for f in (tmp_path / "a").glob("*.safetensors")))
    assert "lm_head.weight" not in names and config_of(tmp_path / "a")["tie_word_embeddings"] is True
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert any("lm_head.weight is stored although" in note for note in inspect(path)["notes"])
    convert(path, tmp_path / "b", "adarope")
    assert "lm_head.weight" in set().union(*(load_file(f) for f in (tmp_path / "b").glob("*.safetensors")))
    assert torch.equal(load(tmp_path / "b")(tokens).logits, model(tokens).logits)


# --- stale frequency buffers (RX-31) ---------------------------------------------------------------------------------


def test_stored_frequencies_are_left_out_where_they_match_and_refused_where_not(folder, tmp_path):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    right = 1.0 / 500000.0 ** (torch.arange(0, 16, 2).float() / 16)
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = right.bfloat16()
    save_file(tensors, file, {"format": "pt"})
    convert(folder, tmp_path / "a", "yarn", factor=2.0)
    assert not any("inv_freq" in n for n in load_file(tmp_path / "a" / "model.safetensors"))
    wrong = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    save_file(tensors | {"model.layers.1.self_attn.rotary_emb.inv_freq": wrong}, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match="layers.1.self_attn.rotary_emb.inv_freq that are not those of its config"
    ):
        convert(folder, tmp_path / "b", "yarn", factor=2.0)
    assert not (tmp_path / "b").exists()


# --- what real configs hold ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["partial_rotary_factor", "rotary_pct"])
@torch.no_grad()
def test_a_key_that_the_family_does_not_read_turns_no_head_in_part(folder, tmp_path, edit_config, tokens, model, key):
    edit_config(folder, **{key: 0.5})
    assert inspect(folder)["rotary_dim"] == 16
    convert(folder, tmp_path / "ada", "adarope")
    assert torch.equal(load(tmp_path / "ada")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("method", ["yarn", "pi", "llama3"])
@torch.no_grad()
def test_a_family_that_knows_longrope_alone_gets_the_table_as_its_factors(saved, tmp_path, tokens, method):
    path, _ = saved("phi3")
    convert(path, tmp_path / "out", method, factor=2.0)
    assert config_of(tmp_path / "out")["rope_parameters"]["rope_type"] == "longrope"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    live = load(f"{path}@{method}:2")
    assert (stock(tokens).logits - live(tokens).logits).abs().max() <= LOGITS


def test_a_config_that_is_silent_on_head_dim_gets_it_said(saved, tmp_path, edit_config):
    path, _ = saved("mixtral", hidden_size=128)
    edit_config(path, ("head_dim",))
    convert(path, tmp_path / "out", "yarn", factor=2.0)
    assert config_of(tmp_path / "out")["head_dim"] == 16
    load(tmp_path / "out")


@torch.no_grad()
def test_the_old_name_su_loads_and_is_written_as_longrope(longrope, edit_config, tmp_path, tokens):
    """RX-22."""
    path, model = longrope
    block = config_of(path)["rope_parameters"]
    old = {"type": "su", "short_factor": block["short_factor"], "long_factor": block["long_factor"]}
    edit_config(path, ("rope_parameters",), rope_theta=block["rope_theta"], rope_scaling=old)
    assert torch.equal(load(path)(tokens[:, :60]).logits, model(tokens[:, :60]).logits)
    for method in ("rope", "adarope"):
        convert(path, tmp_path / method, method)
        assert '"su"' not in (tmp_path / method / "config.json").read_text()
        load(tmp_path / method)


def test_a_plain_rope_is_written_in_both_spellings(folder, tmp_path):
    """RX-02: whoever reads the top level alone must not find a default."""
    assert "rope_theta" not in config_of(folder)
    convert(folder, tmp_path / "a", "rope")
    export(folder, tmp_path / "b")
    for out in ("a", "b"):
        assert (
            config_of(tmp_path / out)["rope_theta"] == config_of(tmp_path / out)["rope_parameters"]["rope_theta"] == 5e5
        )


def test_a_target_of_an_unchanged_table_is_what_the_config_claims(folder, tmp_path):
    """RX-23."""
    result = convert(folder, tmp_path / "out", "rope", target=512)
    assert result["target"] == config_of(tmp_path / "out")["max_position_embeddings"] == 512
    assert any("fails until it is trained" in note for note in result["notes"])


def test_an_extended_parent_that_stays_as_it_is_is_not_said_to_start_over(folder, tmp_path):
    convert(folder, tmp_path / "yarn", "yarn", factor=2.0)
    notes = convert(tmp_path / "yarn", tmp_path / "kept", "rope")["notes"]
    assert any("its yarn table is kept" in note for note in notes)
    notes = convert(tmp_path / "yarn", tmp_path / "ntk", "ntk", factor=4.0)["notes"]
    assert any("starts from its original 128 tokens" in note for note in notes)
