import sys
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
        got.niah_needle: ("{type_needle_v}", "{key}", "{value}"),
        got.vt_template: ("{context}", "{query}"),
        got.vt_prefix: ("{num_v}", "{query}"),
        got.cwe_template: ("{context}",),
        got.fwe_template: ("{context}",),
    }.items():
        assert all(field in text for field in fields)
    assert [t.count("{}") for t in (got.niah_prefix, got.vt_first, got.vt_hop, got.cwe_entry)] == [2, 2, 2, 2]
    assert got.niah_template.startswith("A special magic {type_needle_v} is hidden")


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
