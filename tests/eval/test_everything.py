import json
from pathlib import Path

import pytest

from ropex.errors import DataError, OutputError
from ropex.eval import everything
from ropex.eval.everything import evaluate_all
from ropex.facts import MEASURED

TEXT = Path(__file__).parents[2] / "demo" / "text" / "dev.txt"


def test_one_folder_holds_every_evaluation_and_their_page(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    made = evaluate_all(["nano@yarn:2"], [512], tmp_path / "all", data=[TEXT], samples=1, essays=TEXT)
    kinds = ["nll", "needle", "recall", "ruler"]
    assert list(made) == [*kinds, "failed", "page"] and not made["failed"]  # and no tasks
    for kind in kinds:
        folder = tmp_path / "all" / kind
        assert json.loads((folder / "report.json").read_text())["kind"] == kind
        assert (folder / f"{kind}.png").exists()
    page = Path(made["page"]).read_text()
    assert page.count("nano@yarn:2") > 3 and "niah_single_1" in page and "NLL of the text" in page
    told = made["recall"]["settings"]
    assert told["formats"] == list(MEASURED) and told["windows"] == made["recall"]["results"][0]["windows"] == 4


def test_an_evaluation_that_cannot_be_made_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise DataError("no words here")

    monkeypatch.setattr(everything, "evaluate_ruler", fail)
    made = evaluate_all(["nano"], [160], tmp_path / "all", data=[TEXT], style="lines", recall_windows=1)
    assert made["failed"] == {"ruler": "no words here"} and Path(made["page"]).exists()
    told = made["recall"]["settings"]
    assert told["formats"] == ["lines"] and told["windows"] == 1  # the one format that nano knows
    for name in ("evaluate_nll", "evaluate_needle", "evaluate_recall"):
        monkeypatch.setattr(everything, name, fail)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("my own page")
    with pytest.raises(OutputError, match="other things"):
        evaluate_all(["nano"], [160], tmp_path / "mine", data=[TEXT])
    with pytest.raises(DataError, match="no words"):
        evaluate_all(["nano"], [160], tmp_path / "none", data=[TEXT])
    assert not (tmp_path / "none" / "report.html").exists()
