import json

import pytest
import torch
from families import tiny

from ropex import attach
from ropex.errors import DataError, OptionError
from ropex.eval.heads.compare import spearman
from ropex.eval.heads.revert import ranked
from ropex.eval.heads.scores import read_scores, write_scores
from ropex.eval.nll import token_nll
from ropex.seam import rope_of_model, rotaries, rotary_state
from ropex.spec import make_spec

IDS = torch.randint(3, 97, (2, 160), generator=torch.Generator().manual_seed(2))


def learned(stir):
    model = tiny("llama")
    attach(model, make_spec("adarope", rope_of_model(model), target=256, init="yarn"))
    stir(model)
    return model


def test_each_row_costs_what_the_model_loses_without_it_and_is_put_back(stir):
    model = learned(stir)
    before = rotary_state(model)
    nll, rows = ranked(model, IDS)
    assert all(torch.equal(value, before[name]) for name, value in rotary_state(model).items())
    assert len(rows) == 3 * (2 + 8) and [r["cost"] for r in rows] == sorted((r["cost"] for r in rows), reverse=True)
    assert nll == pytest.approx(float(token_nll(model, IDS).mean()), abs=1e-5)
    dearest = rows[0]
    rotary, fresh = rotaries(model)[dearest["layer"]], model.ropex_spec.fresh(rope_of_model(model))
    with torch.no_grad():
        for name in ("delta",) if dearest["part"] == "frequencies" else ("tau", "gamma"):
            getattr(rotary, name)[dearest["head"]] = fresh[name][dearest["head"]]
    assert float(token_nll(model, IDS).mean()) - nll == pytest.approx(dearest["cost"], abs=1e-5)
    assert fresh["tau"][0] != 1  # a scale goes back to what the conversion gave, not to none


def test_a_model_without_learned_heads_has_none_to_put_back():
    with pytest.raises(OptionError, match="for adarope"):
        ranked(tiny("llama"), IDS)


def head(layer, number, copies):
    return {"layer": layer, "head": number, "kv_head": number // 2, "needle": {"64": {"copies": copies}}}


HEADS = [head(layer, number, (layer * 4 + number) / 8) for layer in (0, 1) for number in range(4)]


def test_scores_come_back_as_they_were_written(tmp_path):
    file = tmp_path / "scores.json"
    write_scores(HEADS, file)
    assert json.loads(file.read_text())["1-3"] == [0.875]
    assert read_scores(file, HEADS) == [i / 8 for i in range(8)]
    file.write_text(json.dumps({f"{i // 4}-{i % 4}": [0.0, 1.0] for i in range(8)}))
    assert read_scores(file, HEADS) == [0.5] * 8


def test_a_pattern_of_key_heads_counts_for_all_of_their_queries(tmp_path):
    file = tmp_path / "full_attention_heads.tsv"
    file.write_text("0.1\t0.2\n0.3\t1.0\n")
    assert read_scores(file, HEADS) == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 1.0, 1.0]


@pytest.mark.parametrize("text", ["", "{}", "0.1\t0.2\n", "a\tb\n", "{broken", '{"0-0": []}', '{"0": 1}'])
def test_a_list_of_other_heads_is_refused(tmp_path, text):
    file = tmp_path / "list"
    file.write_text(text)
    with pytest.raises(DataError, match="heads"):
        read_scores(file, HEADS)
    with pytest.raises(DataError, match="no needles"):
        write_scores([{"layer": 0, "head": 0}], file)


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    assert spearman([1, 1, 2, 3], [3, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
