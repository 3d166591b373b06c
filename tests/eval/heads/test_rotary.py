"""What the probe says of a converted model's own numbers."""

import pytest
import torch
from families import tiny

from ropex import attach
from ropex.eval.heads.rotary import facts, pairing, tables, trained_window
from ropex.seam import rope_of_model, rotaries
from ropex.spec import make_spec


def converted(name, method="adarope", **asked):
    model = tiny(name)
    return attach(model, make_spec(method, rope_of_model(model), **asked))


def test_learned_numbers_are_told_head_by_head(stir):
    model = converted("llama", target=512)
    stir(model)
    told, rotary = facts(model, [100, 300]), rotaries(model)[1]
    assert list(told) == [0, 1, 2] and len(told[1]) == 8
    for h, head in enumerate(told[1]):
        assert head["theta_ratio"] == pytest.approx(rotary.delta[h // 4].exp().tolist())
        assert (head["tau"], head["gamma"]) == (rotary.tau[h].item(), rotary.gamma[h].item())
        assert list(head["lambda"]) == ["100", "128", "256", "300", "512"]  # 128 is the native window
        for length, scale in head["lambda"].items():
            ratio = max(int(length), 128) / 128
            by_hand = torch.tensor(1 + ratio).log() ** rotary.gamma[h] / rotary.tau[h]
            assert scale == pytest.approx(by_hand.item(), rel=1e-5)


def test_heads_that_share_are_told_alike():
    told = facts(converted("llama", target=512, share_heads=True), [128])
    assert told[0] == [told[0][0]] * 8


def test_a_table_of_a_method_is_no_learned_number():
    assert facts(converted("llama", "yarn", factor=4), [128]) == {}
    assert facts(tiny("llama"), [128]) == {}


def test_tables_cover_the_head_and_every_layer():
    plain = tables(tiny("phi"))
    assert plain[0].shape == (1, 8) and (plain[0][0, :4] > 0).all() and (plain[0][0, 4:] == 0).all()
    resting = tables(tiny("smollm3"))
    turning = rope_of_model(tiny("smollm3")).turning
    assert [layer for layer, theta in resting.items() if (theta > 0).any()] == list(turning)
    gemma = tables(tiny("gemma3_text"))
    assert not torch.equal(gemma[0], gemma[5])  # sliding layers have a table of their own
    own = converted("llama", target=512)
    assert tables(own)[0].shape == (2, 8) and trained_window(own) == 512 and trained_window(tiny("llama")) == 128
    assert pairing(tiny("glm")) == (4, True) and pairing(tiny("llama")) == (8, False)
