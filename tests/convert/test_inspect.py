import subprocess
import sys

from safetensors.torch import save_file

from ropex import load
from ropex.convert.convert import convert
from ropex.convert.inspect import inspect
from ropex.seam import rotaries, rotary_state

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
