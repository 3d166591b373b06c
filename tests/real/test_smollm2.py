"""What ropex promises, on a real checkpoint."""

import pytest
import torch
from tolerances import LOGITS, STOCK
from transformers import AutoModelForCausalLM

import ropex
from ropex.convert.convert import convert
from ropex.convert.export import export
from ropex.convert.inspect import inspect
from ropex.pairing import head_permutation, repeat_heads
from ropex.seam import rotaries

pytestmark = pytest.mark.real


def test_it_is_what_inspect_says(gguf, smollm2):
    shape = {"layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "rope_theta": 100000.0, "window": 8192}
    for path in (gguf, smollm2):
        facts = inspect(path)
        assert {k: facts[k] for k in shape} == shape and facts["parameters"] == 134_515_008
        assert facts["adds"]["adarope"] == 3420
    assert inspect(gguf)["pairing"] == "interleaved" and inspect(smollm2)["pairing"] == "half-split"


def test_ggufs_rows_become_half_split_by_our_own_index_map(gguf, smollm2):
    """An independent path to the same weights: the file's rows, dequantised and permuted here."""
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    raw = {t.name: t for t in GGUFReader(gguf).tensors}
    with safe_open(smollm2 / "model.safetensors", "pt") as shard:
        for theirs, ours, heads in (("attn_q", "q_proj", 9), ("attn_k", "k_proj", 3)):
            tensor = raw[f"blk.7.{theirs}.weight"]
            rows = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            expected = rows[repeat_heads(head_permutation("interleaved", "half-split", 64, 64), heads)]
            assert torch.equal(shard.get_tensor(f"model.layers.7.self_attn.{ours}.weight"), expected)


@torch.no_grad()
def test_converted_to_adarope_its_logits_are_its_parents_to_the_last_bit(smollm2, tmp_path, ids, parent_logits):
    convert(smollm2, tmp_path / "ada", "adarope")
    assert (ropex.load(tmp_path / "ada")(ids).logits - parent_logits).abs().max() == 0


@torch.no_grad()
def test_yarn_init_is_transformers_own_yarn_and_survives_export(smollm2, tmp_path, ids, parent_logits):
    convert(smollm2, tmp_path / "stock", "yarn", factor=2.0)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype="auto")(ids).logits
    convert(smollm2, tmp_path / "ada", "adarope", init="yarn", factor=2.0)
    ours = ropex.load(tmp_path / "ada")(ids).logits
    assert (ours - stock).abs().max() <= STOCK < (ours - parent_logits).abs().max()
    export(tmp_path / "ada", tmp_path / "out")
    remote = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", trust_remote_code=True)
    assert torch.equal(remote(ids).logits, ours)


@torch.no_grad()
def test_rope_id_exports_to_stock_transformers(smollm2, tmp_path, ids):
    """Scale off, and the scale at 16,384 tokens folded into q; no remote code, equal logits."""
    convert(smollm2, tmp_path / "id", "rope-id")
    live = ropex.load(tmp_path / "id")
    at_16k = float(rotaries(live)[0].scale(torch.tensor([[16383]])))
    for rotary in rotaries(live):
        rotary.log_coef = 0.0
    for name, options, scale in (("off", {"scale": False}, 1.0), ("baked", {"bake_length": 16384}, at_16k)):
        export(tmp_path / "id", tmp_path / name, **options)
        rotaries(live)[0].tau.fill_(1 / scale)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        expected = live(ids).logits
        assert (stock(ids).logits - expected).abs().max() <= LOGITS * expected.abs().max()
