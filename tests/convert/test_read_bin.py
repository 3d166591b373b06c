import json
import os
import shutil
from collections import OrderedDict

import pytest
import torch
from sources import built

from ropex.convert.read_bin import read_bin, ties_words
from ropex.convert.source import every
from ropex.errors import CheckpointError


def save_bin(model, path, shards: int = 1, **more):
    """The model as transformers 4 saved it: torch.save, and an index where there are several files."""
    model.save_pretrained(path)
    (path / "model.safetensors").unlink()
    state = OrderedDict(model.state_dict()) | more
    if shards == 1:
        torch.save(state, path / "pytorch_model.bin")
        return path
    weight_map = {}
    for i in range(shards):
        name = f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        part = dict(list(state.items())[i::shards])
        torch.save(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_read_is_the_model_that_was_saved(tmp_path, model, tokens, shards):
    source = read_bin(save_bin(model, tmp_path / "bin", shards))
    read = dict(source.tensors(every))
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(built(source, tmp_path / "out")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("shards", [1, 3])
def test_only_wanted_tensors_are_read(tmp_path, model, shards):
    source = read_bin(save_bin(model, tmp_path / "bin", shards))
    assert [n for n, _ in source.tensors(lambda n: n.endswith("1.self_attn.k_proj.weight"))] == [
        "model.layers.1.self_attn.k_proj.weight"
    ]


def test_a_tensor_read_does_not_hold_on_to_its_file(tmp_path, model):
    """Slices of one buffer come out alone: a writer would take the whole buffer with each."""
    flat = torch.arange(64.0)
    folder = save_bin(model, tmp_path / "bin", **{"model.a": flat[:8], "model.b": flat[8:]})
    read = dict(read_bin(folder).tensors(every))
    assert torch.equal(read["model.a"], flat[:8]) and read["model.a"].untyped_storage().nbytes() == 32


def test_stale_frequency_buffers_are_dropped(tmp_path, model):
    """RX-31: old checkpoints carry them, and an index may or may not name them."""
    stale = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    folder = save_bin(model, tmp_path / "bin", 3, **stale)
    assert dict(read_bin(folder).tensors(every)).keys() == model.state_dict().keys()


def test_a_tied_head_comes_out_once(tmp_path, make_model, tokens):
    """RX-30: one tensor on disk, the flag true, and the same logits."""
    model = make_model(tie_word_embeddings=True)
    source = read_bin(save_bin(model, tmp_path / "bin"))
    assert "lm_head.weight" not in dict(source.tensors(every)) and source.config["tie_word_embeddings"]
    assert torch.equal(built(source, tmp_path / "out")(tokens).logits, model(tokens).logits)


def test_a_head_that_differs_from_the_words_it_should_be_tied_to_is_kept(tmp_path, make_model, tokens):
    """RX-30: a reload must not tie them again."""
    model = make_model(tie_word_embeddings=True)
    other = make_model(seed=9).lm_head.weight.detach()
    source = read_bin(save_bin(model, tmp_path / "bin", **{"lm_head.weight": other}))
    assert torch.equal(dict(source.tensors(every))["lm_head.weight"], other)
    assert source.config["tie_word_embeddings"] is False and "differ" in source.notes[0]
    again = built(source, tmp_path / "out")
    assert torch.equal(again(tokens).logits, model.model(tokens).last_hidden_state @ other.T)


def test_words_and_head_that_share_storage_but_are_not_tied_come_out_twice(tmp_path, model):
    words = model.state_dict()["model.embed_tokens.weight"]
    source = read_bin(save_bin(model, tmp_path / "bin", **{"lm_head.weight": words}))
    read = dict(source.tensors(every))
    assert torch.equal(read["lm_head.weight"], read["model.embed_tokens.weight"])
    assert read["lm_head.weight"].data_ptr() != read["model.embed_tokens.weight"].data_ptr()


def test_a_silent_config_is_tied_as_its_family_is():
    assert ties_words({"model_type": "gemma"}) and not ties_words({"model_type": "llama"})
    assert not ties_words({"model_type": "gemma", "tie_word_embeddings": False})


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_file_that_needs_code_is_refused_and_the_code_does_not_run(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = save_bin(model, tmp_path / "bin", bad=Runs())
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .*running code.*system.*safetensors"):
        read_bin(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], "ends after .* download it again"),
        (lambda raw: raw[: len(raw) // 2], "ends after .* download it again"),
        (lambda raw: b"", "ends after 0 bytes"),
        (lambda raw: raw[:300] + raw[900:], "damaged.*download it again"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (lambda raw: b"\x80\x02}q\x00." * 9, "no torch.save file of PyTorch 1.6"),
    ],
)
def test_a_damaged_file_is_named_with_the_cure(tmp_path, model, damage, message):
    """RX-34."""
    folder = save_bin(model, tmp_path / "bin")
    file = folder / "pytorch_model.bin"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as raised:
        read_bin(folder)
    assert "pytorch_model.bin" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [[torch.ones(2)], {"state_dict": {"a": torch.ones(2)}}, {"step": 3}])
def test_a_file_with_more_than_tensors_is_refused(tmp_path, model, value):
    folder = save_bin(model, tmp_path / "bin")
    torch.save(value, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="state_dict"):
        read_bin(folder)


def edit_index(folder, edit):
    path = folder / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


SHARD = "pytorch_model-00002-of-00003.bin"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update({"model.norm.weight": "pytorch_model-00009-of-00003.bin"}), "00009.* missing"),
        (lambda m: m.update({"model.more.weight": SHARD}), "names model.more.weight in .*00002"),
        (lambda m: m.update({"model.norm.weight": "../secret.bin"}), "outside the folder"),
        (lambda m: m.update({"model.norm.weight": "/etc/passwd"}), "outside the folder"),
        (lambda m: m.update({"model.norm.weight": ".."}), "missing|outside"),
        (lambda m: m.pop("model.layers.1.self_attn.q_proj.weight"), "does not name"),
        (lambda m: m.update({"model.norm.weight": next(v for v in m.values() if v != m["model.norm.weight"])}), "puts"),
        (lambda m: m.update({"model.norm.weight": 3}), "no weight_map"),
    ],
)
def test_an_index_that_disagrees_is_refused_before_anything_is_read(tmp_path, model, edit, message):
    """RX-31."""
    folder = save_bin(model, tmp_path / "bin", 3)
    edit_index(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        read_bin(folder)


def test_a_missing_shard_is_named(tmp_path, model):
    folder = save_bin(model, tmp_path / "bin", 3)
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD}.*missing"):
        read_bin(folder)
    shutil.rmtree(folder)
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="neither"):
        read_bin(folder)


def test_other_files_are_carried_and_weights_are_not(tmp_path, model):
    folder = save_bin(model, tmp_path / "bin", 3)
    for name in ("tokenizer.json", "LICENSE", "README.md", "training_args.bin"):
        (folder / name).write_text("{}")
    (tmp_path / "out").mkdir()
    source = read_bin(folder)
    source.carry(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"tokenizer.json", "LICENSE", "generation_config.json"}
    assert source.bytes == sum(p.stat().st_size for p in folder.glob("pytorch_model*.bin"))
    assert source.checkpoint is None and source.rotary() == {}
