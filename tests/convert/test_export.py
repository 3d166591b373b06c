import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

import ropex
from ropex import attach
from ropex.checkpoint import open_checkpoint
from ropex.config import ADAROPE
from ropex.convert.export import export
from ropex.errors import CheckpointError, OptionError, UnsupportedError
from ropex.seam import rope_of_model, rotaries, rotary_state
from ropex.spec import make_spec


@pytest.fixture
def run(tmp_path, folder, make_model, stir):
    """A run of `ropex extend` as it lies on disk, with recognisable values, and the live model it stands for."""

    def make(method="adarope", lora=True, source=folder, **asked):
        model = make_model()
        spec = make_spec(method, rope_of_model(model), **asked)
        attach(model, spec)
        if spec.learned:
            stir(model)
        trained = rotary_state(model)
        if lora:
            generator = torch.Generator().manual_seed(3)
            for layer in range(3):
                for name, rows in (("q_proj", 128), ("k_proj", 32)):
                    a, b = torch.randn(4, 64, generator=generator), torch.randn(rows, 4, generator=generator)
                    module = f"model.layers.{layer}.self_attn.{name}"
                    trained |= {f"{module}.lora_A": a * 0.1, f"{module}.lora_B": b * 0.1}
                    weight = model.get_submodule(module).weight
                    weight.data += 2 * (b * 0.1) @ (a * 0.1)
        path = tmp_path / "run"
        path.mkdir()
        save_file(trained, path / "trained.safetensors")
        block = {"r": 4, "alpha": 8, "targets": ["q_proj", "k_proj"]} if lora else None
        (path / "run.json").write_text(json.dumps({"source": str(source), "spec": spec.block(), "lora": block}))
        return path, model

    return make


@pytest.mark.parametrize("lora", [True, False])
def test_a_run_exports_to_what_ropex_and_transformers_load_as_the_live_model(run, tmp_path, tokens, lora):
    path, live = run(init="yarn", factor=4.0, lora=lora)
    result = export(path, tmp_path / "out")
    assert result["format"] == "per-head" and result["merged"] == (6 if lora else 0)
    with torch.no_grad():
        expected = live(tokens).logits
        assert (ropex.load(path)(tokens).logits - expected).abs().max() <= LOGITS
        assert torch.equal(ropex.load(tmp_path / "out")(tokens).logits, ropex.load(path)(tokens).logits)
        remote = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert torch.equal(remote(tokens).logits, ropex.load(path)(tokens).logits)
        padded = torch.cat((torch.zeros(2, 9, dtype=torch.long), tokens), 1)
        mask = (torch.arange(209) >= 9).long().expand(2, -1)
        assert (remote(padded, attention_mask=mask).logits[:, 9:] - expected).abs().max() <= LOGITS


def test_the_export_loads_where_ropex_is_not_installed(run, tmp_path, tokens):
    """The same interpreter with ropex blocked; equal logits, cache and generation included."""
    path, _ = run(init="yarn", factor=4.0)
    export(path, tmp_path / "out")
    with torch.no_grad():
        expected = ropex.load(path)(tokens).logits
        generated = ropex.load(path).generate(tokens[:1], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    torch.save((tokens, expected, generated), tmp_path / "expected.pt")
    script = f"""
        import sys
        class Block:
            def find_spec(self, name, *_):
                if name.partition(".")[0] == "ropex":
                    raise ImportError("ropex is not installed here")
        sys.meta_path.insert(0, Block())
        import torch
        from transformers import AutoModel, AutoModelForCausalLM
        torch.set_num_threads(1)
        tokens, expected, generated = torch.load({str(tmp_path / "expected.pt")!r})
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, expected)
            out = model.generate(tokens[:1], max_new_tokens=5, min_new_tokens=5, do_sample=False)
            assert torch.equal(out, generated)
            body = AutoModel.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True)
            assert torch.equal(model.lm_head(body(tokens).last_hidden_state), expected)
        half = AutoModelForCausalLM.from_pretrained(
            {str(tmp_path / "out")!r}, trust_remote_code=True, dtype=torch.bfloat16
        )
        kinds = {{p.dtype for n, p in half.named_parameters() if ".adarope." in n}}
        assert kinds == {{torch.float32}}, kinds
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_rotary_tensor_lacking_from_the_export_makes_loud_not_plausible_logits(run, tmp_path, tokens):
    path, _ = run(lora=False)
    export(path, tmp_path / "out")
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    del tensors["model.layers.1.self_attn.adarope.gamma"]
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert model(tokens).logits.isnan().any()


@pytest.mark.parametrize(("scale", "bake"), [(False, None), (True, 512)])
def test_rope_id_exports_to_stock_transformers_with_no_code(run, tmp_path, tokens, scale, bake):
    path, live = run("rope-id", lora=True)
    result = export(path, tmp_path / "out", scale=scale, bake_length=bake)
    assert result["format"] == "stock" and not (tmp_path / "out" / "modeling_adarope.py").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "proportional" and ADAROPE not in config
    with torch.no_grad():
        constant = float(rotaries(live)[0].scale(torch.tensor([[511]]))) if bake else 1.0
        rotaries(live)[0].tau.fill_(1 / constant)
        for rotary in rotaries(live):
            rotary.log_coef = 0.0
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert type(stock).__name__ == "LlamaForCausalLM"
        assert (stock(tokens).logits - live(tokens).logits).abs().max() <= LOGITS


def test_a_learned_shared_table_exports_as_longrope_factors(run, tmp_path, tokens):
    path, live = run(share_heads=True, init="yarn", factor=4.0)
    with pytest.raises(UnsupportedError, match="--bake-length.*--no-scale"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(path, tmp_path / "out", bake_length=300)
    with torch.no_grad():
        constant = float(rotaries(live)[0].scale(torch.tensor([[299]])))
        rotaries(live)[0].gamma.zero_()
        rotaries(live)[0].tau.fill_(1 / constant)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert stock.config.rope_parameters["rope_type"] == "longrope"
        for length in (100, 128, 129, 200):  # short and long tables are one: no jump at the boundary
            got, expected = stock(tokens[:, :length]).logits, live(tokens[:, :length]).logits
            assert (got - expected).abs().max() <= LOGITS


def test_pairs_that_do_not_rotate_survive_as_longrope_factors(model):
    from ropex.tables import longrope_block, stock_table

    rope = rope_of_model(model)
    spec = make_spec("rope-id", rope)
    theta = spec.table(rope).theta
    block = longrope_block(theta, rope)
    got = stock_table(rope, block).theta
    assert (got[:4] - theta[:4]).abs().max() <= 1.2e-7 * theta[0] and got[4:].max() < 1e-25


def test_what_the_format_cannot_say_is_refused(run, tmp_path, folder):
    path, _ = run(init="yarn", factor=4.0)
    with pytest.raises(OptionError, match="leave --bake-length"):
        export(path, tmp_path / "out", bake_length=512)
    with pytest.raises(OptionError, match="exclude each other"):
        export(path, tmp_path / "out", bake_length=512, scale=False)
    with pytest.raises(OptionError, match="not a size"):
        export(path, tmp_path / "out", max_shard_size="many")
    with pytest.raises(OptionError, match="no length-dependent scale"):
        export(folder, tmp_path / "out", scale=False)
    assert not (tmp_path / "out").exists()


def test_a_run_that_lacks_its_rotary_tensors_is_refused(run, tmp_path):
    """RX-08: half of the method must not be exported as the whole."""
    from safetensors.torch import load_file

    path, _ = run()
    tensors = {
        n: t for n, t in load_file(path / "trained.safetensors").items() if "layers.1.self_attn.adarope" not in n
    }
    save_file(tensors, path / "trained.safetensors")
    with pytest.raises(CheckpointError, match="rotary tensors"):
        export(path, tmp_path / "out")
    (path / "trained.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not finished"):
        export(path, tmp_path / "out")


def test_dtype_shards_and_metadata(run, tmp_path, tokens):
    """RX-25 and RX-35: summed in float32, cast once; rotary tensors stay float32; format 'pt' is written."""
    path, live = run(init="yarn", factor=4.0)
    export(path, tmp_path / "out", dtype="bfloat16", max_shard_size="50KB")
    out = open_checkpoint(tmp_path / "out")
    assert len(out.shards) > 2 and out.metadata["format"] == "pt"
    assert {t.dtype for n, t in out.tensors.items() if ".adarope." in n} == {"F32"}
    assert out.config["dtype"] == "bfloat16"
    loaded, merged = ropex.load(tmp_path / "out"), ropex.load(path)
    for name, parameter in merged.named_parameters():
        expected = parameter if ".adarope." in name else parameter.bfloat16()
        assert torch.equal(loaded.get_parameter(name), expected), name


def test_a_cast_that_overflows_is_refused(tmp_path, model):
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    model.save_pretrained(tmp_path / "big")
    with pytest.raises(OptionError, match="up_proj.*float16"):
        export(tmp_path / "big", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_dropping_the_scale_keeps_its_constant_part(run, tmp_path, tokens):
    path, live = run(share_heads=True, init="yarn", factor=4.0)
    export(path, tmp_path / "out", scale=False)
    with torch.no_grad():
        rotaries(live)[0].gamma.zero_()
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert (stock(tokens).logits - live(tokens).logits).abs().max() <= LOGITS


def test_a_yarn_factor_is_not_counted_twice_when_the_scale_is_folded_in(run, tmp_path, tokens):
    path, live = run(share_heads=True, init="yarn", factor=4.0, ada_freq=False)
    from safetensors.torch import load_file

    tensors = load_file(path / "trained.safetensors")
    tensors |= {n: torch.zeros_like(t) for n, t in tensors.items() if n.endswith("delta")}
    save_file(tensors, path / "trained.safetensors")
    export(path, tmp_path / "out", bake_length=300)
    with torch.no_grad():
        first = rotaries(live)[0]
        first.delta.zero_()
        constant = float(first.scale(torch.tensor([[299]])))
        first.gamma.zero_()
        first.tau.fill_(1 / constant)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert (stock(tokens).logits - live(tokens).logits).abs().max() <= LOGITS


def test_a_run_trained_on_a_run_exports_with_both_merged(run, tmp_path, tokens):
    first, _ = run(init="yarn", factor=4.0)
    second = tmp_path / "second"
    second.mkdir()
    for name in ("run.json", "trained.safetensors"):
        (second / name).write_bytes((first / name).read_bytes())
    block = json.loads((second / "run.json").read_text()) | {"source": str(first)}
    (second / "run.json").write_text(json.dumps(block))
    export(second, tmp_path / "out")
    with torch.no_grad():
        expected = ropex.load(second)(tokens).logits
        assert (expected - ropex.load(first)(tokens).logits).abs().max() > 0.1
        assert (ropex.load(tmp_path / "out")(tokens).logits - expected).abs().max() <= LOGITS


def test_a_run_whose_source_is_gone_says_so(run, tmp_path, folder):
    path, _ = run()
    folder.rename(tmp_path / "moved")
    for use in (lambda: export(path, tmp_path / "out"), lambda: ropex.load(path)):
        with pytest.raises(CheckpointError, match="trained on .*, which is gone"):
            use()
