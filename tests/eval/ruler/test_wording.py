import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ropex.errors import OptionError, UnsupportedError
from ropex.eval.ruler import wording

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")


def test_templates_keep_their_fields() -> None:
    got = wording.load_wording()
    for text, fields in {
        got.niah_template: ("{type_needle_v}", "{context}", "{query}"),
        got.niah_template_one: ("{type_needle_v}", "{context}", "{query}"),
        got.niah_needle: ("{type_needle_v}", "{key}", "{value}"),
        got.vt_template: ("{context}", "{query}"),
        got.vt_prefix: ("{num_v}", "{query}"),
        got.cwe_template: ("{context}",),
        got.fwe_template: ("{context}",),
        got.qa_template: ("{context}", "{query}"),
        got.qa_document: ("{i}", "{document}"),
    }.items():
        assert all(field in text for field in fields)
    filled = (got.niah_prefix, got.niah_prefix_one, got.vt_first, got.vt_hop, got.cwe_entry)
    assert [text.count("{}") for text in filled] == [2] * 5
    assert got.niah_template.startswith("Some special magic {type_needle_v} are hidden")
    assert got.niah_template_one.startswith("A special magic {type_needle_v} is hidden")
    assert got.niah_prefix.endswith("are") and got.niah_prefix_one.endswith("is")


def test_the_table_of_departures_is_all_that_differs() -> None:
    ours, theirs = asdict(wording.load_wording()), asdict(wording.load_wording(nvidia=False))
    assert {name for name in ours if ours[name] != theirs[name]} == {entry.field for entry in wording.DEPARTURES}
    for entry in wording.DEPARTURES:
        assert entry.lm_eval in theirs[entry.field], entry.name
        assert entry.nvidia in ours[entry.field], entry.name
        assert not entry.lm_eval or entry.lm_eval in entry.nvidia or entry.lm_eval not in ours[entry.field], entry.name
    assert "assigned the value {query}, they are" in ours["vt_prefix"]


def test_lm_eval_is_read_and_never_imported() -> None:
    """Its task modules fetch data when imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lm_eval", "nltk")]:
        del sys.modules[name]
    wording.load_wording.cache_clear()
    wording.load_wording()
    assert not [name for name in sys.modules if name.partition(".")[0] in ("lm_eval", "nltk")]


def test_without_lm_eval_the_hint_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording.importlib.util, "find_spec", lambda name: None)
    wording.load_wording.cache_clear()
    with pytest.raises(OptionError, match="pip install lm-eval wonderwords==2.2.0") as caught:
        wording.load_wording()
    assert "\n" not in str(caught.value)
    wording.load_wording.cache_clear()


def test_without_wonderwords_the_hint_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    wording.load_words.cache_clear()
    with pytest.raises(OptionError, match="pip install wonderwords==2.2.0"):
        wording.load_words()
    wording.load_words.cache_clear()


def test_an_lm_eval_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(wording.importlib.util, "find_spec", lambda name: Spec)
    wording.load_wording.cache_clear()
    with pytest.raises(UnsupportedError, match="pip install lm-eval==0.4.13"):
        wording.load_wording()
    wording.load_wording.cache_clear()
