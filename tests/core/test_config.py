import json

import pytest

from ropex.config import rope_of, write_rope
from ropex.convert.inspect import inspect
from ropex.errors import CheckpointError, UnsupportedError

NESTED = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "spelling",
    [
        NESTED,
        {"rope_theta": 500000.0},
        {"rope_theta": 500000, "rope_scaling": None},
        {**NESTED, "rope_theta": 500000.0},
        {**NESTED, "rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
    ],
)
def test_every_spelling_of_plain_rope_reads_alike(folder, edit_config, spelling):
    """RX-02."""
    edit_config(folder, drop=("rope_parameters", "rope_theta", "rope_scaling"), **spelling)
    facts = inspect(folder)
    assert facts["rope_theta"] == 500000 and facts["rope"] == {"type": "default"} and facts["method"] == "rope"


def test_two_bases_that_disagree_are_refused_with_both_values(folder, edit_config):
    """RX-02: transformers silently takes one of them."""
    edit_config(folder, **NESTED, rope_theta=10000.0)
    with pytest.raises(CheckpointError, match=r"500000.*10000|10000.*500000"):
        inspect(folder)


@pytest.mark.parametrize(
    "block",
    [
        {"rope_parameters": YARN | {"rope_theta": 500000.0}},
        {"rope_scaling": YARN, "rope_theta": 500000},
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128}, "rope_theta": 5e5},
        {"rope_scaling": YARN | {"type": "yarn"}, "rope_theta": 500000.0},
        {"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 500000.0}},
    ],
)
def test_every_spelling_of_a_scaled_rope_reads_alike(folder, edit_config, block):
    """RX-22; and RX-23: the native window is the recorded original, not what yarn claims."""
    edit_config(folder, drop=("rope_parameters",), max_position_embeddings=512, **block)
    facts = inspect(folder)
    assert facts["rope"]["type"] == "yarn" and facts["rope"]["factor"] == 4.0 and facts["rope_theta"] == 500000
    assert facts["window"] == 128 and facts["claims"] == 512


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, "linear.*yarn"),
        ({"rope_type": "yarn", "factor": "4"}, "factor is '4'"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor is 0.5, below 1"),
        ({"rope_type": "yarn", "factor": True}, "factor is True"),
        ({"rope_type": "longrope", "factor": 2.0, "long_factor": 3, "short_factor": [1.0]}, "long_factor is 3"),
        ({"rope_type": 7}, "type 7"),
    ],
)
def test_impossible_values_are_refused_by_key_and_value(folder, edit_config, block, word):
    edit_config(folder, drop=("rope_parameters",), rope_scaling=block)
    with pytest.raises(CheckpointError, match=word):
        inspect(folder)


def test_the_old_name_su_is_longrope(folder, edit_config):
    factors = [1.0] * 8
    block = {"type": "su", "factor": 2, "long_factor": factors, "short_factor": factors}
    edit_config(folder, drop=("rope_parameters",), rope_scaling=block)
    assert inspect(folder)["rope"]["type"] == "longrope"


def test_both_generations_of_readers_find_the_base_in_what_we_write():
    """RX-02: a reader of the old keys must not fall back to 10000."""
    written = json.loads(json.dumps(write_rope({"rope_theta": 1.0}, YARN | {"rope_theta": 500000.0})))
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500000.0
    assert written["rope_scaling"] == YARN
    assert write_rope({}, NESTED["rope_parameters"])["rope_scaling"] is None


def test_an_unknown_family_and_a_config_without_geometry_are_refused(folder, edit_config):
    edit_config(folder, model_type="deepseek_v3")
    with pytest.raises(UnsupportedError, match="'deepseek_v3' is not supported"):
        inspect(folder)
    edit_config(folder, drop=("num_attention_heads",), model_type="llama")
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        inspect(folder)


def test_rope_of_takes_head_dim_from_the_config_where_it_is_stated(make_config):
    rope = rope_of(make_config().to_dict())
    assert (rope.head_dim, rope.heads * rope.head_dim) == (16, 128)
