"""A model whose heads are built by hand is told apart head by head."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ropex.errors import OptionError
from ropex.eval.heads.classes import CLASSES, Thresholds, classify
from ropex.eval.heads.planted import Planted, plant
from ropex.eval.heads.probe import evaluate_heads, probe
from ropex.haystack import encode_lines

WIDTH, VOCAB, MARK, ASK, VALUE, FIRST = 80, 40, 36, 37, 38, 39
DIM, PAIRS, THETA = 16, 8, 1.5e6
SLOW = PAIRS - 1


def built() -> LlamaForCausalLM:
    """One layer of five heads. A token's embedding says: what every token has (channel 0), that it is the row's first
    (1), a needle's (2), or asks (3). The fast channel pairs serve the heads that look near; the last, of 4e-6 radians a
    token, as good as rests and serves those that look for a thing."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_attention_heads=5, num_key_value_heads=5, head_dim=DIM,
        num_hidden_layers=1, intermediate_size=8, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        layer = model.model.layers[0]
        layer.input_layernorm.weight.fill_(1)
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 1
        embedding[FIRST, 1] = 1
        embedding[[MARK, VALUE], 2] = 1
        embedding[ASK, 3] = 1
        embedding[torch.arange(VOCAB), torch.arange(8, 8 + VOCAB)] = 1  # what makes tokens differ; all norms alike
        q, k = layer.self_attn.q_proj.weight.view(5, DIM, WIDTH), layer.self_attn.k_proj.weight.view(5, DIM, WIDTH)
        near(q[0], k[0], pairs=range(4), offset=1, strength=4.0)  # off-by-one
        near(q[1], k[1], pairs=range(1, 4), offset=0, strength=2.0)  # local: its fastest pair falls off over 4 tokens
        q[2, SLOW, 0], k[2, SLOW, 1] = 2.0, 1.0  # sink: any query, the first token's key
        q[3, SLOW, 3], k[3, SLOW, 2] = 3.0, 1.0  # retrieval: a query that asks, a needle's key
        # head 4 has no weights: it averages over all there is
    return model


def near(q: torch.Tensor, k: torch.Tensor, pairs: range, offset: int, strength: float) -> None:
    """Rows [D, H] that prefer keys `offset` tokens back: a query's pairs are turned back by as many tokens."""
    for f in pairs:
        angle = torch.tensor(-offset * THETA ** (-f / PAIRS))
        q[f, 0], q[f + PAIRS, 0] = angle.cos() * strength, angle.sin() * strength
        k[f, 0] = 1.0


def text(length: int) -> list[int]:
    drawn = torch.randint(0, 36, (length - 1,), generator=torch.Generator().manual_seed(length)).tolist()
    return [FIRST, *drawn]


def needle(length: int) -> Planted:
    ids = text(length)
    at = length // 3
    ids[at : at + 2], ids[-2:] = [MARK, VALUE], [ASK, VALUE]
    return Planted(ids, [length - 2], [VALUE], (at, at + 2), 1 / 3)


KNOWN = ["off-by-one", "local", "sink", "retrieval", "global"]


def test_each_head_is_what_it_was_built_to_be():
    lengths = (64, 256)
    texts, planted = {size: [text(size)] for size in lengths}, {size: [needle(size)] for size in lengths}
    found = probe(built(), texts, planted, queries=256)
    assert [head["class"] for head in found["heads"]] == KNOWN
    assert found["classes"] == {name: 0 if name == "mixed" else 1 for name in CLASSES}
    averaging, finding = found["heads"][4], found["heads"][3]
    assert averaging["growth"] == pytest.approx(1, abs=0.05)
    assert averaging["e2"]["64"] == pytest.approx(32.5, abs=0.01)  # the mean of 1 to 64
    assert finding["needle"]["64"]["mass"] > 0.99 and finding["needle"]["256"]["e2"] == pytest.approx(2, abs=0.1)
    assert finding["needle"]["64"]["copies"] in (0.0, 1.0)  # two tokens share its look alike
    assert averaging["needle"]["256"]["mass"] < 0.02


def test_without_needles_a_head_that_finds_them_passes_for_one_that_averages():
    found = probe(built(), {size: [text(size)] for size in (64, 256)}, {})
    assert [head["class"] for head in found["heads"]] == [*KNOWN[:3], "global", "global"]


def test_thresholds_are_to_be_set():
    head = {"e2": {"64": 9.0, "256": 20.0}} | {name: {"64": 0.2, "256": 0.2} for name in ("sink", "local", "previous")}
    assert classify(head) == "global"
    assert classify(head, Thresholds(sink=0.1)) == "sink"
    assert classify(head, Thresholds(local=0.1, sink=0.1)) == "local"
    assert classify(head, Thresholds(global_e2=30)) == "mixed"
    assert classify(head | {"e2": {"256": 20.0}}) == "mixed"  # of one length nobody knows how it grows


def test_a_head_is_judged_where_its_model_was_trained():
    head = {"e2": {"64": 9.0, "128": 9.5, "256": 200.0}, "sink": {"64": 0.1, "128": 0.1, "256": 0.1}}
    head |= {"local": {"64": 0.6, "128": 0.6, "256": 0.1}, "previous": {"64": 0.1, "128": 0.1, "256": 0.1}}
    assert classify(head, window=128) == "local" and classify(head, window=256) == classify(head) == "global"
    assert classify(head, window=32) == "global"  # measured beyond it alone


@pytest.mark.parametrize("style", ["passkey", "lines"])
def test_a_needle_lies_where_it_is_said_to(tokenizer, style):
    haystack = encode_lines(tokenizer, "\n".join(f"line {i} of some text" for i in range(40)))
    for depth in (0.0, 0.5, 0.9):
        planted = plant(tokenizer, haystack, 300, depth, 0, style=style)
        assert len(planted.ids) == 300 and planted.asking[-1] == 298
        answer = tokenizer.decode(planted.ids[planted.asking[0] + 1 :]).strip(" )\n")
        assert answer and answer in tokenizer.decode(planted.ids[slice(*planted.needle)])
        assert planted.said == planted.ids[planted.asking[0] + 1 :]
        assert abs(planted.needle[0] / 300 - depth) < 0.4


def test_a_checkpoint_is_probed_on_a_text(checkpoint, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Some words of a text that goes on and on.\n" * 60)
    found = evaluate_heads(checkpoint, [file], [128, 256], queries=32, needles=2)
    assert len(found["heads"]) == 16 and found["kind"] == "heads" and found["method"] == "rope"
    assert [len(found["heads"][0][name]) for name in ("e2", "sink", "needle", "geometry")] == [2] * 4
    assert list(found["heads"][0])[:6] == ["layer", "head", "kv_head", "class", "e2", "e2_error"]
    with pytest.raises(OptionError, match="16 tokens or more"):
        evaluate_heads(checkpoint, [file], [8])
