"""--pairing and --from-pairing: which rows move, there and back, and what cannot be permuted."""

import json

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from families import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tolerances import LOGITS

from ropex import load
from ropex.checkpoint import open_checkpoint
from ropex.config import rope_of
from ropex.convert.convert import convert
from ropex.convert.heads import row_index
from ropex.convert.pairing_check import check_pairing
from ropex.convert.write_gguf import write_gguf
from ropex.errors import OptionError, UnsupportedError
from ropex.families import FAMILIES


@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (9, 3), (4, 2), (14, 2), (8, 1), (8, 2)])
@torch.no_grad()
def test_rows_move_head_by_head_by_the_kv_heads_own_count(tmp_path, tokens, heads, kv_heads):
    """RX-01: with an explicit head_dim that is not hidden/heads; against an adjacent-pair reference of its own."""
    model = tiny_llama(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * 8, head_dim=16)
    model.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", pairing="interleaved")
    for name, tensor in load_file(tmp_path / "b" / "model-00001-of-00001.safetensors").items():
        mine = model.state_dict()[name]
        count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if count:  # row 2f of a head is its row f, row 2f + 1 its row f + D/2
            mine = mine.view(count, 2, 8, -1).transpose(1, 2).reshape(mine.shape)
        assert torch.equal(tensor, mine)
    assert (load(tmp_path / "b")(tokens).logits - model(tokens).logits).abs().max() <= LOGITS


@torch.no_grad()
def test_a_wrong_kv_head_count_would_be_seen(tmp_path, model, tokens):
    """RX-01: the classic mistake, made here by hand, must not pass the check above."""
    model.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", pairing="interleaved")
    path = tmp_path / "b" / "model-00001-of-00001.safetensors"
    tensors = load_file(path)
    k = model.state_dict()["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.1.self_attn.k_proj.weight"] = k.view(8, 2, 2, -1).transpose(1, 2).reshape(k.shape).clone()
    save_file(tensors, path, {"format": "pt"})
    assert (load(tmp_path / "b")(tokens).logits - model(tokens).logits).abs().max() > 100 * LOGITS


def test_the_same_pairing_twice_is_refused_and_recorded(tmp_path, folder):
    """RX-12."""
    convert(folder, tmp_path / "b", pairing="interleaved")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["adarope"]["pairing"] == "interleaved"
    with pytest.raises(OptionError, match="interleaved already"):
        convert(tmp_path / "b", tmp_path / "c", pairing="interleaved")
    with pytest.raises(OptionError, match="half-split already"):
        convert(folder, tmp_path / "c")
    with pytest.raises(OptionError, match="records its pairing"):
        convert(tmp_path / "b", tmp_path / "c", from_pairing="half-split")
    assert not (tmp_path / "c").exists()


@torch.no_grad()
def test_a_converted_checkpoint_keeps_its_heads_under_the_other_pairing(tmp_path, folder, tokens, stir):
    from ropex.seam import rotary_state

    convert(folder, tmp_path / "ada", "adarope", init="yarn", factor=2.0)
    live = load(tmp_path / "ada")
    stir(live)
    save_file(rotary_state(live), tmp_path / "ada" / "model-adarope.safetensors", {"format": "pt"})
    convert(tmp_path / "ada", tmp_path / "there", pairing="interleaved")
    convert(tmp_path / "there", tmp_path / "back", pairing="half-split")
    there, back = load(tmp_path / "there"), load(tmp_path / "back")
    assert (there(tokens).logits - live(tokens).logits).abs().max() <= LOGITS
    assert torch.equal(back(tokens).logits, live(tokens).logits)


@torch.no_grad()
def test_a_method_and_a_pairing_in_one_step(tmp_path, folder, tokens):
    convert(folder, tmp_path / "plain", "yarn", factor=2.0)
    convert(folder, tmp_path / "moved", "yarn", factor=2.0, pairing="interleaved")
    want, got = (load(tmp_path / name)(tokens).logits for name in ("plain", "moved"))
    assert (got - want).abs().max() <= LOGITS  # the attention factor on q alone, not on q and k
    convert(tmp_path / "moved", tmp_path / "back", pairing="half-split")
    assert torch.equal(load(tmp_path / "back")(tokens).logits, want)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("q_proj.weight", torch.float8_e4m3fn), ("k_proj.weight", torch.int8), ("q_proj.weight_scale_inv", torch.float32)],
)
def test_quantised_rows_are_refused_where_they_would_move_and_copied_where_not(tmp_path, folder, name, dtype):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    full = f"model.layers.0.self_attn.{name}"
    shape = tensors.get(full, torch.ones(1, 1)).shape
    tensors[full] = torch.ones(shape).to(dtype)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedError, match="quantised"):
        convert(folder, tmp_path / "b", pairing="interleaved")
    convert(folder, tmp_path / "c", "yarn", factor=2.0)
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == file.read_bytes()


dims = st.tuples(st.integers(1, 6), st.integers(1, 4), st.sampled_from([8, 16, 24]), st.sampled_from([0.25, 0.5, 1.0]))


@given(dims, st.sampled_from(list(FAMILIES)), st.sampled_from(["F32", "BF16", "F16", "F64"]), st.randoms())
@settings(max_examples=150, deadline=None)
def test_there_and_back_is_the_identity_for_any_heads_dims_spans_and_dtypes(shape, name, dtype, random):
    """O5: for weights, biases, LoRA rows and norms of every family, on raw bytes."""
    groups, kv_heads, d, partial = shape
    family, heads = FAMILIES[name], groups * kv_heads
    base = {
        "model_type": name, "num_hidden_layers": 8, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": d, "hidden_size": heads * d, "max_position_embeddings": 64, "partial_rotary_factor": partial,
    }  # fmt: skip
    rope = rope_of(base)
    other = "interleaved" if rope.pairing == "half-split" else "half-split"
    layer = family.layer.format(random.choice(rope.turning))
    q, kv = rope.heads * d, rope.kv_heads * d
    rows = {family.q_proj: 2 * q if family.gated else q, family.k_proj: kv, family.fused: q + 2 * kv}
    cases = [(f"{layer}.{m}.{k}", (rows[m], 3)[: 1 if k == "bias" else 2]) for m in family.projections
             for k in ("weight", "bias", "lora_B.weight")]  # fmt: skip
    if family.q_norm:
        cases += [(f"{layer}.{family.k_norm}.weight", s) for s in ((d,), (kv,), (rope.kv_heads, d))]
    for tensor, size in cases:
        from dataclasses import replace

        there = row_index(tensor, size, dtype, rope, other)
        back = row_index(tensor, size, dtype, replace(rope, pairing=other), rope.pairing)
        assert sorted(there) == list(range(len(there))) and int(np.prod(size[:1])) in (len(there), size[0])
        assert (there[back] == np.arange(len(there))).all()
        span = rope.rotary_dim
        still = [i for i in range(len(there)) if i % d >= span]
        assert (there[still] == still).all()
        assert span <= 2 or (there != np.arange(len(there))).any()
    assert row_index(f"{layer}.{family.projections[0]}.lora_A.weight", (4, 3), dtype, rope, other) is None
    assert row_index(f"{layer}.{family.v_proj}.weight", (kv, 3), dtype, rope, other) is None or family.fused


def test_the_fused_projections_v_rows_never_move(tmp_path):
    """RX-16: all of q, then k, then v (Phi-3); a head's q, k and v together (GPT-NeoX)."""
    for name, v_rows in (("phi3", range(160, 192)), ("gpt_neox", [i for i in range(384) if i % 48 >= 32])):
        model = tiny(name)
        model.save_pretrained(tmp_path / name)
        convert(tmp_path / name, tmp_path / f"{name}-b", pairing="interleaved")
        full = f"{FAMILIES[name].layer.format(1)}.{FAMILIES[name].fused}.weight"
        before, after = (open_checkpoint(tmp_path / n).tensors[full] for n in (name, f"{name}-b"))
        a, b = (load_file(info.file)[full] for info in (before, after))
        assert a.shape == b.shape and torch.equal(a[list(v_rows)], b[list(v_rows)])
        moved = {i for i in range(len(a)) if not torch.equal(a[i], b[i])}
        assert moved and not moved & set(v_rows)


def test_the_check_finds_wrongly_labelled_weights_and_from_pairing_mends_them(tmp_path):
    """RX-12: on the shipped checkpoint; fluent text hides it, the loss does not."""
    convert("nano", tmp_path / "moved", pairing="interleaved")
    config = json.loads(open_checkpoint("nano").path.joinpath("config.json").read_text())
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in (tmp_path / "moved").iterdir():
        if file.name.startswith("tokenizer"):
            (wrong / file.name).write_bytes(file.read_bytes())
    (wrong / "config.json").write_text(json.dumps(config))
    (wrong / "model.safetensors").write_bytes((tmp_path / "moved" / "model-00001-of-00001.safetensors").read_bytes())
    found = check_pairing(wrong)
    assert (found["labelled"], found["trained"], found["decided"]) == ("half-split", "interleaved", True)
    assert found["margin"] > 1
    convert(wrong, tmp_path / "mended", from_pairing="interleaved")
    mended = check_pairing(tmp_path / "mended")
    assert mended["trained"] == "half-split" and mended["half-split"] == pytest.approx(
        check_pairing("nano")["half-split"]
    )
    original, back = (open_checkpoint(p) for p in ("nano", tmp_path / "mended"))
    assert load_file(original.shards[0]).keys() == load_file(back.shards[0]).keys()
    for name, tensor in load_file(original.shards[0]).items():
        assert torch.equal(tensor, load_file(back.shards[0])[name])


@torch.no_grad()
def test_sliding_layers_never_run_rows_that_were_moved_away_from_them(tmp_path, tokens):
    """Their own table stays stock, whose code turns the family's pairs."""
    tiny("olmo3").save_pretrained(tmp_path / "a")
    parent = load(tmp_path / "a")(tokens).logits
    convert(tmp_path / "a", tmp_path / "ada", "adarope")
    with pytest.raises(UnsupportedError, match="sliding layers .* are not converted"):
        convert(tmp_path / "ada", tmp_path / "b", pairing="interleaved")
    convert(tmp_path / "a", tmp_path / "c", "adarope", pairing="interleaved")
    assert (load(tmp_path / "c")(tokens).logits - parent).abs().max() <= LOGITS
    convert(tmp_path / "c", tmp_path / "d", pairing="half-split")
    assert torch.equal(load(tmp_path / "d")(tokens).logits, parent)


@torch.no_grad()
def test_two_tables_of_different_scale_stay_two_under_the_other_pairing(tmp_path, tokens):
    """OLMo 3 has YaRN on full attention alone: what layers share is shared within a table."""
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    model = tiny("olmo3", rope_parameters={"full_attention": yarn, "sliding_attention": plain})
    model.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", pairing="interleaved")
    assert (load(tmp_path / "b")(tokens).logits - model(tokens).logits).abs().max() <= LOGITS


@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
         "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_table_that_changes_with_the_length_is_not_called_unchanged(tmp_path, folder, edit_config, tokens, block):
    edit_config(folder, rope_parameters=block | {"rope_theta": 5e5})
    if block["rope_type"] == "dynamic":
        with pytest.raises(OptionError, match="changes its table with every length"):
            convert(folder, tmp_path / "b", pairing="interleaved")
        return
    result = convert(folder, tmp_path / "b", pairing="interleaved", params={"table": "short"})
    assert not result["unchanged"] and any("short one at every length" in note for note in result["notes"])
    short = tokens[:1, :64]
    assert (load(tmp_path / "b")(short).logits - load(folder)(short).logits).abs().max() <= LOGITS


def test_a_repair_says_that_the_logits_change_and_a_format_that_knows_its_rows_takes_none(tmp_path, folder, model):
    assert not convert(folder, tmp_path / "a", from_pairing="interleaved")["unchanged"]
    write_gguf(model.config.to_dict(), model.state_dict().items(), folder, tmp_path / "tiny.gguf", None)
    with pytest.raises(OptionError, match="says how its rows lie"):
        convert(tmp_path / "tiny.gguf", tmp_path / "b", "rope", from_pairing="interleaved")
