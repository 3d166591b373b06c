"""The first family's tests on the disk, over all of them."""

import json

import pytest
import torch
from families import tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

from ropex import load
from ropex.config import rope_of
from ropex.convert.convert import convert
from ropex.convert.export import export
from ropex.families import FAMILIES
from ropex.seam import rotaries, rotary_state

families = pytest.mark.parametrize("name", list(FAMILIES))


@pytest.fixture
def on_disk(tmp_path, name):
    path = tmp_path / name
    model = tiny(name)
    model.save_pretrained(path)
    return path, model


def raw(folder):
    """Every tensor's bytes, dtype and shape by name."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {n: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8)) for n, t in load_file(file).items()}
    return found


def same(a, b):
    return a[:2] == b[:2] and torch.equal(a[2], b[2])


@families
@torch.no_grad()
def test_an_identity_conversion_is_byte_for_byte_and_reloads_as_the_parent(on_disk, tmp_path, tokens):
    path, model = on_disk
    result = convert(path, tmp_path / "ada", "adarope")
    before, after = raw(path), raw(tmp_path / "ada")
    assert result["unchanged"] and all(same(after[n], before[n]) for n in before)
    assert {n for n in after if n not in before} == set(rotary_state(load(tmp_path / "ada")))
    assert torch.equal(load(tmp_path / "ada")(tokens).logits, model(tokens).logits)


@families
@torch.no_grad()
def test_per_head_heads_export_to_what_transformers_loads_with_remote_code(on_disk, tmp_path, tokens, stir):
    path, _ = on_disk
    convert(path, tmp_path / "ada", "adarope", init=None)
    live = load(tmp_path / "ada")
    stir(live)
    save_file(rotary_state(live), tmp_path / "ada" / "model-adarope.safetensors", {"format": "pt"})
    export(tmp_path / "ada", tmp_path / "out")
    expected = live(tokens).logits
    assert torch.equal(load(tmp_path / "out")(tokens).logits, expected)
    remote = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert torch.equal(remote(tokens).logits, expected)


@families
@torch.no_grad()
def test_rope_id_exports_to_a_config_that_needs_no_code(on_disk, tmp_path, tokens, name, edit_config):
    path, model = on_disk
    if FAMILIES[name].two_tables:  # a method does not discard gemma3's linear factor
        config = json.loads((path / "config.json").read_text())
        full = {"rope_type": "default", "rope_theta": 500000.0}
        edit_config(path, rope_parameters=config["rope_parameters"] | {"full_attention": full})
    convert(path, tmp_path / "id", "rope-id")
    live = load(tmp_path / "id")
    constant = float(rotaries(live)[0].scale(torch.tensor([[299]])))
    assert constant > 1.1
    for rotary in rotaries(live):
        rotary.log_coef = 0.0
        rotary.tau.fill_(1 / constant)
    for out, asked in (("baked", {"bake_length": 300}), ("plain", {"scale": False})):
        export(tmp_path / "id", tmp_path / out, **asked)
        stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / out, output_loading_info=True)
        assert type(stock) is type(model) and not any(info[k] for k in ("missing_keys", "unexpected_keys"))
        assert (stock.eval()(tokens).logits - live(tokens).logits).abs().max() <= LOGITS
        for rotary in rotaries(live):
            rotary.tau.fill_(1.0)


@families
@torch.no_grad()
def test_the_other_pairing_is_the_same_model_and_the_way_back_is_bit_exact(on_disk, tmp_path, tokens, name):
    """O1, O4, O5: only q- and k-side tensors of layers that turn differ."""
    path, model = on_disk
    own = FAMILIES[name].pairing
    other = "interleaved" if own == "half-split" else "half-split"
    result = convert(path, tmp_path / "there", pairing=other)
    assert result["pairing"] == other and result["unchanged"]
    there = load(tmp_path / "there")
    assert (there(tokens).logits - model(tokens).logits).abs().max() <= LOGITS
    with pytest.raises(ValueError, match="custom code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "there", trust_remote_code=False)
    before, moved = raw(path), raw(tmp_path / "there")
    changed = {n for n in before if not same(before[n], moved[n])}
    family = FAMILIES[name]
    side = {family.q_norm, family.k_norm, *family.projections} - {""}
    assert all(side & set(n.split(".")) for n in changed)
    assert {int(n.split("layers.")[1].split(".")[0]) for n in changed} == turning(path)
    convert(tmp_path / "there", tmp_path / "back", pairing=own)
    back = raw(tmp_path / "back")
    assert back.keys() == before.keys() and all(same(back[n], before[n]) for n in before)
    config, original = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "back", path))
    assert rope_of(config) == rope_of(original) and {**original, **config} == config  # and older readers' spelling


def turning(path):
    rope = rope_of(json.loads((path / "config.json").read_text()))
    return {*rope.turning, *(rope.local.turning if rope.local else ())}


@families
def test_metadata_says_format_pt(on_disk, tmp_path):
    path, _ = on_disk
    convert(path, tmp_path / "ada", "adarope")
    for file in (tmp_path / "ada").glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            assert shard.metadata()["format"] == "pt"
