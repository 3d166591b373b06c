import json
import struct

import pytest

from ropex.checkpoint import open_checkpoint, read_header, split_method
from ropex.errors import CheckpointError, OptionError


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def encoded(**tensors) -> bytes:
    return json.dumps(tensors).encode()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-lfs"),
        (raw(b"{}", length=2**63), "header claims"),
        (raw(b"{not json}"), "unreadable"),
        (raw(b'{"a":' + json.dumps(entry([1], 0, 4)).encode() + b',"a":1}', b"0000"), "twice"),
        (raw(encoded(a=entry([2], 0, 8), b=entry([2], 4, 12)), b"0" * 12), "overlap"),
        (raw(encoded(a=entry([3], 0, 8)), b"0" * 8), "spans 8 bytes"),
        (raw(encoded(a=entry([2], 0, 8)), b"0" * 7), "incomplete"),
        (raw(encoded(a=entry([2], 0, 8)), b"0" * 9), "accounts for"),
        (raw(b"[]"), "not an object"),
        (raw(encoded(a={"dtype": "F32"})), "malformed"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused_with_its_name_and_the_reason(tmp_path, content, word):
    """RX-34."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=word) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_shard_cut_by_one_byte_is_refused(folder):
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="incomplete"):
        open_checkpoint(folder)


def test_headers_agree_with_safetensors(sharded):
    from safetensors import safe_open

    checkpoint = open_checkpoint(sharded)
    assert len(checkpoint.shards) > 2
    for file in checkpoint.shards:
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                assert list(checkpoint.tensors[name].shape) == list(shard.get_tensor(name).shape)


@pytest.mark.parametrize("fault", ["shard", "entry", "wrong", "outside", "empty"])
def test_an_index_that_disagrees_with_its_shards_is_refused(sharded, fault):
    """RX-31."""
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(set(index["weight_map"].values()))
    tensor = next(n for n, s in index["weight_map"].items() if s == names[0])
    if fault == "shard":
        (sharded / names[1]).unlink()
    elif fault == "entry":
        del index["weight_map"][tensor]
    elif fault == "wrong":
        index["weight_map"][tensor] = names[1]
    elif fault == "outside":
        index["weight_map"][tensor] = "../elsewhere.safetensors"
    else:
        del index["weight_map"]
    path.write_text(json.dumps(index))
    word = {"shard": names[1], "entry": tensor, "wrong": tensor, "outside": "outside", "empty": "weight_map"}[fault]
    with pytest.raises(CheckpointError, match=word.replace(".", r"\.")):
        open_checkpoint(sharded)


def test_a_stray_weight_file_is_noted_and_left_aside(sharded):
    (sharded / "extra.safetensors").write_bytes(raw(encoded(a=entry([1], 0, 4)), b"0000"))
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.stray == ("extra.safetensors",) and "a" not in checkpoint.tensors


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="no safetensors"):
        open_checkpoint(tmp_path)


def test_a_method_can_ride_on_a_path():
    assert split_method("a/b@yarn:2") == ("a/b", "yarn", 2.0)
    assert split_method("a/b@nope") == ("a/b", "nope", None)
    assert split_method("user@host/b") == ("user@host/b", None, None)
    with pytest.raises(OptionError, match="not a number"):
        split_method("a@yarn:two")
