import json

import pytest
import torch
from tolerances import STOCK
from transformers import AutoModelForCausalLM

import ropex
from ropex.checkpoint import open_checkpoint
from ropex.convert.convert import convert
from ropex.convert.inspect import inspect
from ropex.errors import CheckpointError, OptionError, RopexError, UnsupportedError


def raw(checkpoint, name: str) -> tuple[str, tuple[int, ...], bytes]:
    info = checkpoint.tensors[name]
    data = info.file.read_bytes()[info.start : info.end]
    return info.dtype, info.shape, data


@pytest.mark.parametrize("layout", ["folder", "sharded"])
@pytest.mark.parametrize(("to", "asked"), [("adarope", {}), ("rope-id", {}), ("yarn", {"factor": 2.0})])
def test_existing_tensors_are_copied_byte_for_byte(request, tmp_path, layout, to, asked):
    source = open_checkpoint(request.getfixturevalue(layout))
    before = {file: file.read_bytes() for file in source.shards}
    convert(source.path, tmp_path / "out", to, **asked)
    out = open_checkpoint(tmp_path / "out")
    assert all(raw(out, name) == raw(source, name) for name in source.tensors)
    assert {n for n in out.tensors if n not in source.tensors} == (
        set() if to == "yarn" else {n for n in out.tensors if ".adarope." in n}
    )
    assert all(file.read_bytes() == content for file, content in before.items())


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_an_identity_conversion_reloads_as_the_parent(request, tmp_path, model, tokens, layout):
    result = convert(request.getfixturevalue(layout), tmp_path / "ada", "adarope", target=512)
    assert result["unchanged"] and result["added_parameters"] == 3 * (2 * 8 + 2 * 8)
    assert torch.equal(ropex.load(tmp_path / "ada")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(("to", "asked"), [("yarn", {"factor": 4.0}), ("pi", {"target": 512}), ("half-rope", {})])
def test_a_stock_method_loads_in_transformers_and_in_ropex_alike(folder, tmp_path, model, tokens, to, asked):
    result = convert(folder, tmp_path / "out", to, **asked)
    assert result["format"] == "stock" and not result["unchanged"]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    assert (stock - model(tokens).logits).abs().max() > 0.01
    assert torch.equal(ropex.load(tmp_path / "out")(tokens).logits, stock)
    assert (ropex.load(f"{folder}@{to}:4")(tokens).logits - stock).abs().max() <= STOCK


def test_the_window_follows_and_the_original_is_kept(folder, tmp_path):
    """RX-23: a second extension starts from the recorded original length."""
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    convert(folder, tmp_path / "once", "yarn", target=512)
    config = json.loads((tmp_path / "once" / "config.json").read_text())
    assert config["max_position_embeddings"] == 512
    assert config["rope_parameters"]["original_max_position_embeddings"] == 128
    assert json.loads((tmp_path / "once" / "tokenizer_config.json").read_text())["model_max_length"] == 512
    convert(tmp_path / "once", tmp_path / "twice", "yarn", target=1024)
    twice = inspect(tmp_path / "twice")
    assert twice["window"] == 128 and twice["claims"] == 1024 and twice["rope"]["factor"] == 8.0


def test_tunables_reach_the_config_and_are_shown(folder, tmp_path):
    """RX-04: every tunable is visible afterwards."""
    convert(folder, tmp_path / "out", "yarn", factor=2.0, params={"beta_fast": 16.0})
    assert inspect(tmp_path / "out")["rope"]["beta_fast"] == 16.0
    convert(folder, tmp_path / "ada", "adarope", init="yarn", factor=2.0, params={"beta_slow": 2.0})
    assert inspect(tmp_path / "ada")["spec"]["params"]["beta_slow"] == 2.0


def test_a_stock_loader_refuses_a_per_head_checkpoint(folder, tmp_path):
    """RX-03 (b): transformers would drop the rotary tensors with a warning; an unknown model_type stops it."""
    convert(folder, tmp_path / "ada", "adarope")
    with pytest.raises(ValueError, match="trust_remote_code|custom code|adarope_llama"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ada", trust_remote_code=False)


def test_a_change_that_changes_nothing_is_refused(folder, tmp_path):
    """RX-04: success must not be reported for a no-op."""
    with pytest.raises(RopexError, match="nothing would change"):
        convert(folder, tmp_path / "out", "p-rope", params={"fraction": 1.0})
    assert not (tmp_path / "out").exists()


def test_a_converted_checkpoint_is_not_converted_again(folder, tmp_path):
    convert(folder, tmp_path / "ada", "adarope")
    with pytest.raises(UnsupportedError, match="converted already"):
        convert(tmp_path / "ada", tmp_path / "again", "yarn", factor=2.0)


def test_a_method_is_not_stacked_on_a_scaling_that_the_weights_were_trained_with(folder, tmp_path, edit_config):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 32, "rope_theta": 500000.0}
    edit_config(folder, rope_parameters=llama3)
    with pytest.raises(OptionError, match="'llama3'.*--init rope"):
        convert(folder, tmp_path / "out", "yarn", factor=2.0)
    result = convert(folder, tmp_path / "ada", "adarope")
    tokens = torch.arange(3, 90)[None]
    assert result["unchanged"]
    assert torch.equal(ropex.load(tmp_path / "ada")(tokens).logits, ropex.load(folder)(tokens).logits)


def test_other_files_come_along_and_provenance_is_written(folder, tmp_path):
    (folder / "LICENSE").write_text("free")
    (folder / "README.md").write_text("a window of 128")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    convert(folder, tmp_path / "out", "adarope")
    assert (tmp_path / "out" / "LICENSE").read_bytes() == (folder / "LICENSE").read_bytes()
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    assert not (tmp_path / "out" / "README.md").exists()
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o644}
    made = json.loads((tmp_path / "out" / "ropex.json").read_text())
    assert made["command"] == "convert" and made["spec"]["method"] == "adarope" and made["versions"]["torch"]


def test_rotary_tensors_are_float32_whatever_the_weights_are(tmp_path, model):
    """RX-06, RX-35: the rest keeps its dtype."""
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    convert(tmp_path / "bf16", tmp_path / "out", "adarope", init="yarn", factor=2.0)
    out = open_checkpoint(tmp_path / "out")
    assert {t.dtype for n, t in out.tensors.items() if ".adarope." in n} == {"F32"}
    assert {t.dtype for n, t in out.tensors.items() if ".adarope." not in n} == {"BF16"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_in_q_or_k_that_is_no_number_is_refused_by_name(tmp_path, model, value):
    """RX-34."""
    model.model.layers[1].self_attn.k_proj.weight.data[3, 5] = value
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        convert(tmp_path / "broken", tmp_path / "out", "adarope")
    assert not (tmp_path / "out").exists()


def test_a_parent_whose_table_changes_with_every_length_cannot_start_adarope(folder, tmp_path, edit_config):
    """RX-19: one of the tables would silently stand for all."""
    edit_config(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500000.0})
    with pytest.raises(OptionError, match="changes its table with every length"):
        convert(folder, tmp_path / "ada", "adarope")


def test_a_folder_of_chat_templates_comes_along_and_is_listed(folder, tmp_path):
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ messages }}")
    convert(folder, tmp_path / "out", "adarope")
    assert (tmp_path / "out" / templates.name / "tool_use.jinja").read_text() == "{{ messages }}"
    listed = json.loads((tmp_path / "out" / "ropex.json").read_text())["files"]
    assert "additional_chat_templates/tool_use.jinja" in listed
    convert(folder, tmp_path / "out", "yarn", factor=2.0, overwrite=True)
