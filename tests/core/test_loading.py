import pytest
import torch
from safetensors.torch import load_file, save_file

import ropex
from ropex.convert.convert import convert
from ropex.errors import CheckpointError, OptionError
from ropex.lora import lora_pairs, merge_into, merged
from ropex.seam import rotaries


def test_a_stock_checkpoint_loads_as_transformers_loads_it(folder, model, tokens):
    assert torch.equal(ropex.load(folder)(tokens).logits, model(tokens).logits)


def test_a_method_applies_on_the_fly_and_changes_the_model(folder, model, tokens):
    """RX-04: the change must reach the live model."""
    on_the_fly = ropex.load(f"{folder}@yarn:4")
    assert ropex.method_of(on_the_fly) == "yarn"
    assert (on_the_fly(tokens).logits - model(tokens).logits).abs().max() > 0.01


def test_a_converted_checkpoint_loads_and_keeps_float32_rotary_in_bf16(folder, tmp_path):
    convert(folder, tmp_path / "ada", "adarope", init="yarn", factor=4.0)
    model = ropex.load(tmp_path / "ada", dtype="bf16")
    assert model.dtype == torch.bfloat16
    assert {r.theta0.dtype for r in rotaries(model)} == {torch.float32}


@pytest.mark.parametrize("fault", ["gone", "shape"])
def test_a_rotary_tensor_that_is_gone_or_misshapen_is_refused_by_name(folder, tmp_path, fault):
    """RX-03 (c)."""
    out = tmp_path / "ada"
    convert(folder, out, "adarope")
    shard, name = out / "model-adarope.safetensors", "model.layers.1.self_attn.adarope.delta"
    tensors = load_file(shard)
    tensors[name] = torch.zeros(1, 8)
    if fault == "gone":
        del tensors[name]
        index = out / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(f'    "{name}": "model-adarope.safetensors",\n', ""))
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        ropex.load(out)


def test_a_checkpoint_that_lacks_a_weight_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.1\.self_attn\.q_proj\.weight"):
        ropex.load(folder)


def test_an_unknown_weight_is_refused_not_dropped(folder):
    tensors = load_file(folder / "model.safetensors") | {"model.layers.0.self_attn.mystery": torch.zeros(3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="mystery"):
        ropex.load(folder)


def test_unknown_names_are_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        ropex.load(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="unknown dtype"):
        ropex.load(folder, dtype="fp8")
    with pytest.raises(OptionError, match="unknown method"):
        ropex.load(f"{folder}@yarrn:2")


def test_loading_runs_no_code_from_the_checkpoint(folder, edit_config, tmp_path):
    """RX-49."""
    marker = tmp_path / "marker"
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w').write('ran')\n")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"})
    ropex.load(folder)
    assert not marker.exists()


def test_lora_is_summed_in_float32(model):
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.self_attn.q_proj"
    module = model.get_submodule(name).bfloat16()
    before = module.weight.detach().clone()
    a, b = torch.randn(4, 64, generator=generator) * 0.01, torch.randn(128, 4, generator=generator) * 0.01
    exact = before.double() + 2 * b.double() @ a.double()
    torch.testing.assert_close(merged(before, a, b, 2.0), exact.float())
    merge_into(model, {f"{name}.lora_A": a, f"{name}.lora_B": b}, 2.0)
    assert torch.equal(module.weight, merged(before, a, b, 2.0).bfloat16())


def test_a_lone_lora_matrix_is_refused():
    with pytest.raises(CheckpointError, match="lora_B"):
        lora_pairs({"x.lora_A": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="neither rotary nor LoRA"):
        lora_pairs({"x.lora_B": torch.zeros(1)})
