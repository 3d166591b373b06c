import subprocess
import sys

import pytest
import torch
from families import tiny
from safetensors.torch import save_file

from ropex import load
from ropex.convert.convert import convert
from ropex.convert.inspect import head_norms, inspect
from ropex.families import FAMILIES
from ropex.seam import rope_of_model, rotaries, rotary_state

KEYS = {
    "family", "layers", "heads", "kv_heads", "head_dim", "rotary_dim", "pairing", "method", "rope_theta", "window",
    "dtype", "parameters",
}  # fmt: skip


def test_the_facts_are_the_models(folder, sharded, model):
    for path in (folder, sharded):
        facts = inspect(path)
        assert facts.keys() >= KEYS
        assert {k: facts[k] for k in KEYS - {"parameters"}} == {
            "family": "llama", "layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 16, "rotary_dim": 16,
            "pairing": "half-split", "method": "rope", "rope_theta": 500000.0, "window": 128, "dtype": "float32",
        }  # fmt: skip
        assert facts["parameters"] == sum(p.numel() for p in model.parameters())
        assert facts["adds"]["adarope"] == 3 * (2 * 8 + 2 * 8)


def test_a_conversion_shows(folder, tmp_path):
    convert(folder, tmp_path / "ada", "adarope", init="yarn", target=512)
    facts = inspect(tmp_path / "ada")
    assert (facts["method"], facts["window"], facts["claims"]) == ("adarope", 128, 512)
    assert facts["spec"]["init"] == "yarn" and facts["spec"]["params"]["factor"] == 4.0
    convert(folder, tmp_path / "id", "rope-id")
    assert inspect(tmp_path / "id")["method"] == "rope-id"


def test_it_reads_headers_without_torch(folder):
    """RX-46."""
    script = f"import sys; from ropex.convert.inspect import inspect; inspect({str(folder)!r})\n"
    script += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_scale_of_every_head_is_shown(folder, tmp_path, stir):
    """RX-18."""
    convert(folder, tmp_path / "ada", "adarope")
    live = load(tmp_path / "ada")
    stir(live)
    save_file(rotary_state(live), tmp_path / "ada" / "model-adarope.safetensors", {"format": "pt"})
    shown = inspect(tmp_path / "ada")["scale"]
    assert [layer["layer"] for layer in shown] == [0, 1, 2]
    for layer, rotary in zip(shown, rotaries(live), strict=True):
        assert layer["tau"] == rotary.tau.tolist() and layer["gamma"] == rotary.gamma.tolist()


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "qwen3_next", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_by_head_are_those_of_the_heads_that_the_model_makes(tmp_path, name, dtype):
    """RX-16: against the queries and keys that come out of the unfused computation, one input channel at a time."""
    model = tiny(name).to(dtype)
    model.save_pretrained(tmp_path / name)
    shown = {layer["layer"]: layer for layer in head_norms(tmp_path / name)}
    family = FAMILIES[name]
    for layer in rope_of_model(model).turning:
        attention = model.get_submodule(family.layer.format(layer))
        heads, kv, d = 8, 8 if name == "gpt_neox" else 2, 16
        if name == "gpt_neox":  # as its forward splits: view [H, 3 D], then thirds
            q, k, _ = attention.query_key_value.weight.view(heads, 3 * d, -1).chunk(3, 1)
        elif name == "phi3":
            q, k, _ = attention.qkv_proj.weight.split([heads * d, kv * d, kv * d])
        else:
            q, k = attention.q_proj.weight, attention.k_proj.weight
            if family.gated:  # as its forward splits: a head's query, then its gate
                q = q.view(heads, 2 * d, -1).chunk(2, 1)[0]
        for part, weight, count in (("q", q, heads), ("k", k, kv)):
            expected = weight.double().reshape(count, d, -1).flatten(1).norm(dim=1)
            assert torch.allclose(torch.tensor(shown[layer][part], dtype=torch.float64), expected, rtol=1e-6)
