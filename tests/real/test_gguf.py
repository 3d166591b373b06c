"""A real GGUF file, read tensor by tensor and written again."""

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import ropex
from ropex.convert.read_gguf import read_gguf
from ropex.convert.source import every
from ropex.convert.write_gguf import write_gguf

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def again(gguf, tmp_path_factory):
    """SmolLM2 as a float32 GGUF file."""
    source = read_gguf(gguf)
    out = tmp_path_factory.mktemp("gguf") / "SmolLM2.gguf"
    write_gguf(source.config, source.tensors(every), out.parent, out, gguf)
    return out


def test_every_tensor_is_what_transformers_dequantises(gguf):
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    state, names = model.state_dict(), set()
    for name, tensor in read_gguf(gguf).tensors(every):
        assert torch.equal(tensor, state[name]), name
        names.add(name)
    assert state.keys() - names == {"lm_head.weight"}  # tied


def test_written_as_float32_and_read_again_its_tensors_are_equal(gguf, again):
    before, after = read_gguf(gguf), read_gguf(again)
    assert before.config == after.config
    for (one, first), (two, second) in zip(before.tensors(every), after.tensors(every), strict=True):
        assert one == two and torch.equal(first, second)


def test_the_tokenizer_travels(gguf, again, smollm2):
    fields = [
        {k: f.contents() for k, f in GGUFReader(p).fields.items() if k[:10] == "tokenizer."} for p in (gguf, again)
    ]
    assert fields[0] == fields[1] and fields[0]["tokenizer.ggml.pre"] == "smollm"
    folder = AutoTokenizer.from_pretrained(smollm2)
    assert folder.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert folder.eos_token_id == 2


@torch.no_grad()
def test_ropex_loads_what_it_wrote(again, ids, parent_logits):
    assert torch.equal(ropex.load(again)(ids).logits, parent_logits)
