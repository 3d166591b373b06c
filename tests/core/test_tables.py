import math

import pytest
import torch
from tolerances import LOGITS
from transformers import LlamaForCausalLM

from ropex import attach
from ropex.errors import OptionError
from ropex.spec import make_spec
from ropex.tables import METHODS, stock_table, table

ASKED = {
    "rope": {}, "pi": {"factor": 4.0}, "ntk": {"factor": 4.0}, "yarn": {"factor": 4.0}, "llama3": {"factor": 8.0},
    "longrope": {"factor": 2.0, "params": {"long_factor": [1.0 + 0.3 * i for i in range(8)]}},
    "rope-id": {}, "half-rope": {}, "high-freq": {}, "nope": {}, "p-rope": {"params": {"fraction": 0.5}},
}  # fmt: skip


@pytest.fixture
def rope(model):
    from ropex.seam import rope_of_model

    return rope_of_model(model)


def test_every_method_but_the_learned_one_is_covered_here():
    assert set(ASKED) == set(METHODS) - {"adarope"}


@pytest.mark.parametrize("name", ASKED)
def test_the_table_is_what_transformers_computes_from_the_stock_spelling(name, rope):
    spec = make_spec(name, rope, **ASKED[name])
    ours = spec.table(rope)
    stock = stock_table(rope, METHODS[name].stock(rope, spec.params))
    torch.testing.assert_close(ours.theta, stock.theta, rtol=1e-6, atol=0)
    assert ours.attention_factor == stock.attention_factor


@pytest.mark.parametrize("name", ASKED)
def test_a_model_with_the_stock_config_gives_the_same_logits(name, model, make_model, make_config, tokens, rope):
    spec = make_spec(name, rope, **ASKED[name])
    config = make_config(rope_parameters=METHODS[name].stock(rope, spec.params), max_position_embeddings=512)
    stock = LlamaForCausalLM(config).eval()
    stock.load_state_dict(model.state_dict())
    converted = attach(make_model(), spec)
    if spec.log_coef:  # stock transformers has no length-dependent scale
        for module in converted.modules():
            if hasattr(module, "log_coef"):
                module.log_coef = 0.0
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, stock(tokens).logits, rtol=0, atol=LOGITS)


def test_rope_id_golden_values(rope):
    """By hand for D = 16, L_train = 128: four rungs from 2 pi/32 to 4 pi/128, a factor of 2 down in three steps."""
    theta = table("rope-id", rope, {"train_length": None}).theta
    expected = [2 * math.pi / 32 * 0.5 ** (i / 3) for i in range(4)] + [0.0] * 4
    torch.testing.assert_close(theta, torch.tensor(expected))


def test_rope_golden_values(rope):
    theta = table("rope", rope, {}).theta
    torch.testing.assert_close(theta, torch.tensor([500000.0 ** (-2 * i / 16) for i in range(8)]))


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor(rope):
    before, after = table("rope", rope, {}).theta, table("ntk", rope, {"factor": 4.0}).theta
    assert after[0] == before[0]
    torch.testing.assert_close(before[-1] / after[-1], torch.tensor(4.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("name", "asked", "word"),
    [
        ("yarrn", {}, "unknown method"),
        ("yarn", {}, "--factor"),
        ("yarn", {"factor": 0.5}, "factor is 0.5"),
        ("yarn", {"factor": 2.0, "params": {"beta": 3}}, "no parameter 'beta'"),
        ("yarn", {"target": 64}, "below the native window of 128"),
        ("yarn", {"target": 512, "factor": 2.0}, "give one"),
        ("yarn", {"factor": 2.0, "init": "rope"}, "--init is for adarope"),
        ("adarope", {"init": "nonsense"}, "--init nonsense"),
        ("adarope", {"ada_freq": False, "ada_scale": False}, "nothing to learn"),
        ("longrope", {"factor": 2.0, "params": {"long_factor": [1.0]}}, "a list of 8 numbers"),
        ("p-rope", {"params": {"fraction": 1.5}}, "fraction"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name, asked, word, rope):
    with pytest.raises(OptionError, match=word):
        make_spec(name, rope, **asked).table(rope)
