import json

import pytest

from ropex.demo import run
from ropex.errors import OutputError
from ropex.train.recipe import read_recipe, write_recipe


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo with fewer steps, documents and samples; everything else is what a user runs."""
    patch = pytest.MonkeyPatch()
    short = tmp_path_factory.mktemp("recipe") / "short.yaml"
    write_recipe(short, read_recipe(run.RECIPE) | {"steps_warmup": 1, "steps_joint": 1, "batch_size": 1})
    patch.setattr(run, "RECIPE", short)
    patch.setattr(run, "DOCUMENTS", 2)
    patch.setattr(run, "SAMPLES", 4)
    patch.setattr(run, "TEXT_TOKENS", 2048)
    out, said = tmp_path_factory.mktemp("demo") / "out", []
    report = run.run_demo(out, progress=lambda what, done, total: said.append((what, done, total)))
    patch.undo()
    return out, report, said


def test_the_table_has_its_rows_and_columns(demo):
    _, report, _ = demo
    assert [row["name"] for row in report["rows"]] == ["base", "yarn", "warmup", "joint", "exported"]
    for row in report["rows"]:
        assert list(row["nll"]) == list(row["needle"]) == ["256", "512", "1024", "2048"]
        assert all(1 < value < 10 for value in row["nll"].values())


def test_the_exported_checkpoint_is_the_trained_model(demo):
    _, report, _ = demo
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["exported"]["nll"] == rows["joint"]["nll"] and rows["exported"]["needle"] == rows["joint"]["needle"]
    assert rows["joint"]["nll"] != rows["warmup"]["nll"] != rows["yarn"]["nll"]


def test_base_collapses_past_its_window_and_yarn_does_not(demo):
    _, report, _ = demo
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["base"]["nll"]["2048"] > rows["base"]["nll"]["256"] + 1
    assert rows["yarn"]["nll"]["2048"] < rows["base"]["nll"]["2048"] - 1


def test_every_step_is_kept_and_said(demo):
    out, report, said = demo
    assert {p.name for p in out.iterdir()} == {"converted", "run", "exported", "train.jsonl", "report.json"}
    assert json.loads((out / "report.json").read_text()) == report
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said) and said[-1][1] < said[-1][2]


def test_an_existing_folder_is_kept(demo):
    out, _, _ = demo
    with pytest.raises(OutputError, match="exists"):
        run.run_demo(out)
