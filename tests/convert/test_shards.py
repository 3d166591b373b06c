"""Shards on the disk: what is linked, copied, rewritten; the plan, the manifest, and what verify sees."""

import json
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ropex import load
from ropex.checkpoint import open_checkpoint
from ropex.convert.convert import convert
from ropex.convert.export import export
from ropex.convert.output import PROVENANCE
from ropex.convert.shards import is_finite
from ropex.convert.verify import verify
from ropex.convert.weights import write_shards
from ropex.errors import CheckpointError, OutputError, UnsupportedError


def tensors_of(folder):
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


# --- linking ---------------------------------------------------------------------------------------------------------


def test_linked_shards_are_the_sources_own_files_and_stay_as_they_were(sharded, tmp_path, tokens, model):
    before = {p.name: (p.stat().st_ino, p.stat().st_mode, p.read_bytes()) for p in sharded.glob("*.safetensors")}
    convert(sharded, tmp_path / "out", "adarope", link=True)
    for name, (inode, mode, content) in before.items():
        for path in (sharded / name, tmp_path / "out" / name):
            assert (path.stat().st_ino, path.stat().st_mode, path.read_bytes()) == (inode, mode, content)
    new = {p.name for p in (tmp_path / "out").glob("*.safetensors")} - set(before)
    assert new == {"model-adarope.safetensors"}
    assert torch.equal(load(tmp_path / "out")(tokens).logits, model(tokens).logits)


def test_what_changes_is_rewritten_also_when_linking_is_asked_for(sharded, tmp_path):
    convert(sharded, tmp_path / "out", pairing="interleaved", link=True)
    for shard in open_checkpoint(sharded).shards:
        moved = any(".q_proj." in n or ".k_proj." in n for n in load_file(shard))
        assert (tmp_path / "out" / shard.name).samefile(shard) != moved


def test_another_disk_gets_copies(sharded, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    convert(sharded, tmp_path / "out", "yarn", factor=2.0, link=True)
    for shard in open_checkpoint(sharded).shards:
        copy = tmp_path / "out" / shard.name
        assert copy.read_bytes() == shard.read_bytes() and not copy.samefile(shard)


@pytest.mark.parametrize("link", [False, True])
def test_a_hub_snapshot_of_links_becomes_regular_files_and_its_blobs_stay(sharded, tmp_path, link):
    """RX-33."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        (blobs / f"blob{number}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blobs / f"blob{number}")
    before = {p.name: p.read_bytes() for p in blobs.iterdir()}
    convert(snapshot, tmp_path / "out", "adarope", link=link)
    assert all(p.is_file() and not p.is_symlink() for p in (tmp_path / "out").iterdir())
    assert {p.name: p.read_bytes() for p in blobs.iterdir()} == before
    (tmp_path / "link").symlink_to(snapshot)
    for out in (tmp_path / "link", snapshot):
        with pytest.raises(OutputError, match="the source|not written by ropex"):
            convert(snapshot, out, "adarope", overwrite=True)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_a_real_one_writes_and_writes_nothing(sharded, tmp_path):
    result = convert(sharded, tmp_path / "out", pairing="interleaved", dry_run=True)
    assert not (tmp_path / "out").exists()
    plan = result["plan"]
    assert plan["reordered"] == {
        "model.layers.*.self_attn.q_proj.weight": 3, "model.layers.*.self_attn.k_proj.weight": 3
    }  # fmt: skip
    assert plan["config"]["model_type"] == ["llama", "adarope_llama"]
    largest = 2 * 128 * 64 * 4  # q_proj twice, float32
    assert plan["peak_memory"] == largest
    convert(sharded, tmp_path / "out", pairing="interleaved")
    for shard in plan["shards"]:
        written = (tmp_path / "out" / shard["name"]).stat().st_size
        assert shard["how"] == ("rewritten" if shard["reordered"] else "copied")
        assert 0 <= written - shard["bytes"] < 4096  # the header
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert all(after.get(key) == new for key, (_, new) in plan["config"].items())


def test_a_linking_dry_run_writes_little(sharded, tmp_path):
    plan = convert(sharded, tmp_path / "out", "yarn", factor=4.0, link=True, dry_run=True)["plan"]
    assert plan["bytes"] == 0 and {s["how"] for s in plan["shards"]} == {"linked"}
    assert plan["config"]["max_position_embeddings"] == [128, 512]


def test_a_source_that_is_rewritten_has_a_plan_without_shards(tmp_path, model):
    (tmp_path / "bin").mkdir()
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    result = convert(tmp_path / "bin", tmp_path / "out", "yarn", factor=2.0, dry_run=True, link=True)
    assert not (tmp_path / "out").exists() and result["plan"]["shards"] == []
    assert result["plan"]["config"]["max_position_embeddings"] == [128, 256]
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert 0 <= result["plan"]["bytes"] - size < 0.1 * size
    assert any("--link has no effect" in note for note in result["notes"])


# --- no torch, little memory (RX-37) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["'yarn', factor=2.0", "'yarn', factor=2.0, link=True", "'half-rope'"])
def test_a_conversion_that_a_config_states_imports_no_torch(sharded, tmp_path, asked):
    code = f"""
        import sys
        from ropex.convert.convert import convert
        convert({str(sharded)!r}, {str(tmp_path / "out")!r}, {asked})
        print(sorted({{"torch", "transformers"}} & set(sys.modules)))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def big_folder(path, layers, model):
    """A Llama whose weights are mostly MLP, of about 17 MB a layer."""
    config = model.config.to_dict() | {"num_hidden_layers": layers, "hidden_size": 512, "intermediate_size": 4096}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors, part = {}, 0
    shapes = {"self_attn.q_proj": (128, 512), "self_attn.k_proj": (32, 512), "mlp.up_proj": (8192, 512)}
    weight_map = {}
    for layer in range(layers):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(shape).bfloat16()
        if layer % 8 == 7:
            part += 1
            file = f"model-{part:05d}-of-{layers // 8:05d}.safetensors"
            save_file(tensors, path / file, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            tensors = {}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


CALLS = {
    "convert, reordering": "convert(src, out, pairing='interleaved')",
    "convert, copying": "convert(src, out, 'yarn', factor=2.0)",
    "export": "export(src, out)",
}


@pytest.mark.parametrize("call", CALLS)
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, model, call):
    """RX-37: as many more shards, and no more memory. An export keeps 64 MB before it writes, and maps a shard."""
    peaks = []
    for layers in (32, 96) if call == "export" else (8, 64):
        source = big_folder(tmp_path / f"{layers}", layers, model)
        code = f"""
            from ropex.convert.convert import convert
            from ropex.convert.export import export
            src, out = {str(source)!r}, {str(tmp_path / f"out{layers}")!r}
            {CALLS[call]}
            with open("/proc/self/status") as file:
                print(next(int(line.split()[1]) for line in file if line.startswith("VmHWM")))
        """
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
        peaks.append(int(run.stdout) / 1024)
    shard = 8 * 8.6  # MB; which of an export's shards are mapped at once is the system's affair, up to two of them
    allowed = peaks[0] + 2 * shard if call == "export" else 1.1 * peaks[0]
    assert peaks[1] <= allowed and peaks[1] < 2 * shard + 500


def test_a_streamed_shard_is_written_as_it_comes_and_reads_back(tmp_path, monkeypatch):
    """Past HELD bytes a shard goes to the disk behind the room for its header."""
    from ropex.convert import weights

    monkeypatch.setattr(weights, "HELD", 4000)
    monkeypatch.setattr(weights, "ROOM", 4096)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}.weight": torch.randn(10, 11, generator=generator).to(dtype) for i, dtype in
               enumerate([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8] * 9)}  # fmt: skip
    tensors["scalar"] = torch.tensor(3.5)
    write_shards(tensors.items(), tmp_path, 10**6, {"who": "me"})
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1  # the headers' room ran out
    assert {n for f in files for n in load_file(f)} == set(tensors)
    assert all(torch.equal(tensors_of(tmp_path)[n], t) for n, t in tensors.items())
    with safe_open(files[0], "pt") as shard:
        assert shard.metadata() == {"who": "me", "format": "pt"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())


# --- dtype and metadata (RX-35) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "who": "me"}, {"who": "me"}])
def test_metadata_gains_format_pt_and_keeps_the_users(folder, tmp_path, metadata):
    file = folder / "model.safetensors"
    tensors = {n: t.bfloat16() if "norm" not in n else t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata)
    convert(folder, tmp_path / "out", "yarn", factor=2.0)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as shard:
        assert shard.metadata() == (metadata or {}) | {"format": "pt"}
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(after[n].dtype == t.dtype and torch.equal(after[n], t) for n, t in tensors.items())
    sizes = [sum(p.stat().st_size for p in f.glob("*.safetensors")) for f in (folder, tmp_path / "out")]
    assert abs(sizes[1] - sizes[0]) <= 0.01 * sizes[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38, 0.0, -0.0, 1e-42])
def test_finite_by_the_bits_is_what_torch_says(tmp_path, dtype, value):
    tensor = torch.ones(70, 3).to(dtype)
    tensor[69, 2] = value
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    info = open_checkpoint(tmp_path).tensors["x"]
    assert is_finite(info) == bool(tensor.isfinite().all())


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(sharded, tmp_path):
    convert(sharded, tmp_path / "out", "adarope")
    return tmp_path / "out"


def test_a_fresh_output_is_whole_and_every_file_of_it_is_listed(written, tmp_path):
    result = verify(written)
    listed = json.loads((written / PROVENANCE).read_text())["files"]
    assert set(listed) == {p.name for p in written.iterdir()} - {PROVENANCE}
    assert result["hashed"] == result["files"] == len(listed) and not result["notes"]
    export(written, tmp_path / "exported")
    assert verify(tmp_path / "exported")["hashed"] > 0


def flip(path, at=-3):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(bytes(content))


def resized(path):
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("tau"))
    save_file(tensors | {name: torch.ones(3)}, path, {"format": "pt"})


FAULTS = {
    "a flipped bit": (lambda f: flip(f / "model-00002-of-00007.safetensors"), "its SHA-256 differs"),
    "a flipped bit in the tokenizer": (lambda f: flip(f / "generation_config.json"), "its SHA-256 differs"),
    "a missing file": (lambda f: (f / "generation_config.json").unlink(), "lacks generation_config.json"),
    "a missing shard": (lambda f: (f / "model-00003-of-00007.safetensors").unlink(), "names the shard .* missing"),
    "a cut shard": (lambda f: os.truncate(f / "model-00003-of-00007.safetensors", 5000), "not a whole safetensors"),
    "a wrong rotary shape": (lambda f: resized(f / "model-adarope.safetensors"), r"tau is F32 \[3\] where F32 \[8\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_sees(written, fault):
    make, message = FAULTS[fault]
    make(written)
    with pytest.raises(CheckpointError, match=message) as raised:
        verify(written)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "k_proj.weight has 32 rows where config.json's heads make 64"),
        ({"num_hidden_layers": 4}, "layer 3 lacks its query or key projection"),
        ({"num_hidden_layers": 2}, "belongs to a layer beyond the 2"),
        ({"vocab_size": 98}, "has 97 rows where config.json says vocab_size 98"),
        ({"dtype": "bfloat16"}, "config.json says bfloat16 and the tensors are float32"),
    ],
)
def test_verify_holds_the_headers_to_the_config(folder, edit_config, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        verify(folder)


def test_verify_says_what_it_could_not_compare(folder, sharded, tmp_path):
    assert any("no ropex.json" in note for note in verify(folder)["notes"])
    convert(sharded, tmp_path / "out", "yarn", factor=2.0, link=True)
    notes = verify(tmp_path / "out")["notes"]
    assert sum("linked without being read" in note for note in notes) == len(open_checkpoint(sharded).shards)


def test_verify_hashes_a_gguf_file_and_refuses_what_it_cannot_check(folder, tmp_path):
    export(folder, tmp_path / "out.gguf", to="gguf")
    assert (tmp_path / "out.gguf" / "out.gguf").exists()
    assert verify(tmp_path / "out.gguf")["hashed"] == 1
    flip(tmp_path / "out.gguf" / "out.gguf")
    with pytest.raises(CheckpointError, match="SHA-256"):
        verify(tmp_path / "out.gguf")
    with pytest.raises(UnsupportedError, match="give the folder"):
        verify(tmp_path / "out.gguf" / "out.gguf")


def test_verify_reads_the_numbers_of_q_and_k(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][5, 5] = np.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="layers.1.self_attn.q_proj.weight has values that are not finite"):
        verify(folder)
