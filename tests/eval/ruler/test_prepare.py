"""Fetching data, with the network replaced."""

from pathlib import Path
from typing import Any

import pytest

from ropex.eval.ruler import prepare as module
from ropex.eval.ruler.prepare import data_places, prepare
from ropex.eval.ruler.sources import cache_folder, find_sources

pytest.importorskip("lm_eval")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROPEX_CACHE", str(tmp_path))
    return cache_folder()


def test_the_places_are_those_that_lm_eval_names() -> None:
    places = data_places()
    assert places["essays"].count("/") == 1
    assert places["squad"].endswith("dev-v2.0.json")
    assert places["hotpot"].endswith("hotpot_dev_distractor_v1.json")


def test_what_is_missing_is_fetched_once_and_found(data: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, asked = data_places(), []
    content = {places["squad"]: data.squad.read_bytes(), places["hotpot"]: data.hotpot.read_bytes()}

    def download(address: str) -> bytes:
        asked.append(address)
        return content[address]

    monkeypatch.setattr(module, "_download", download)
    monkeypatch.setattr(module, "_essays", lambda name: b"One two. Three four.")
    found = prepare()
    assert [(entry["name"], entry["error"]) for entry in found] == [("essays", None), ("squad", None), ("hotpot", None)]
    assert len(asked) == 2
    assert prepare() == found
    assert len(asked) == 2
    sources, missing = find_sources(("essays", "squad", "hotpot"), "pg", None, None)
    assert not missing
    assert sources.essays is not None and sources.essays.sentences == ["One two.", "Three four."]
    assert sorted(path.name for path in cache.iterdir()) == ["essays.txt", "hotpot.json", "squad.json"]


def test_what_cannot_be_fetched_is_one_line_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: str) -> bytes:
        raise OSError("no route to host\nlong story")

    monkeypatch.setattr(
        module, "_download", lambda address: b"<html>gone</html>" if "dev-v2" in address else fail(address)
    )
    found = {entry["name"]: entry for entry in prepare()}
    assert "no route to host" in found["essays"]["error"]
    assert "is not what it was" in found["squad"]["error"]
    assert str(cache / "hotpot.json") in found["hotpot"]["error"]
    assert all("\n" not in entry["error"] and entry["bytes"] is None for entry in found.values())
    assert list(cache.iterdir()) == []
