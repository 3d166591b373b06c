import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropex.eval.ruler.score import Metric, clean, score, settled


@pytest.mark.parametrize(
    ("prediction", "rulers", "whole"),
    [
        ("It is 1234567.", 1, 1),
        (" 1234567", 1, 1),
        ("91234567", 1, 0),
        ("12345678", 1, 0),
        ("123456", 0, 0),
        ("12345\x0067", 0, 0),
        ("", 0, 0),
        ("1234567" * 2, 1, 0),
        ("x1234567y", 1, 1),
        ("12345678 or 1234567", 1, 1),
    ],
)
def test_a_number_is_found_in_any_sentence(prediction: str, rulers: float, whole: float) -> None:
    assert score(prediction, ["1234567"]) == rulers
    assert score(prediction, ["1234567"], whole_numbers=True) == whole


def test_case_does_not_matter_and_each_reference_counts_alike() -> None:
    assert score("abcde, FGHIJ", ["ABCDE", "fghij", "KLMNO", "PQRST"]) == 0.5


def test_control_characters_become_line_breaks() -> None:
    assert clean(" \x00a\x01b\tc\x1f ") == "a\nb\nc"
    assert score("a\x01b", ["ab"]) == 0


@pytest.mark.parametrize("references", ["1234567", [], [7], [""], None])
def test_references_of_a_wrong_type_are_refused(references: object) -> None:
    with pytest.raises(TypeError):
        score("1234567", references)  # type: ignore[arg-type]


@given(prediction=st.text("ab1 ", max_size=12), rest=st.text("ab1 ", max_size=6))
def test_what_is_settled_stays_so(prediction: str, rest: str) -> None:
    references = ["a1", "11"]
    if settled(prediction, references):
        for whole in (False, True):
            assert score(prediction + rest, references, whole_numbers=whole) == 1


def test_a_number_at_the_end_may_still_grow() -> None:
    assert not settled("it is 1234567", ["1234567"])
    assert settled("it is 1234567.", ["1234567"])


@pytest.mark.parametrize(
    ("prediction", "share", "best"),
    [
        ("France", 1 / 3, 1),
        ("in FRANCE, western Europe", 2 / 3, 1),
        ("It lies in Franc", 0, 0),
        ("fran\nce", 0, 0),
        ("\t\x07the republic of France of Western Europe\x00", 1, 1),
    ],
)
def test_questions_take_the_best_answer(prediction: str, share: float, best: float) -> None:
    """Hand-worked; NVIDIA's measure is the best, lm-eval's the share."""
    references = ["France", "western europe", "The Republic of France"]
    assert score(prediction, references) == pytest.approx(share)
    assert score(prediction, references, "part") == best


@given(prediction=st.text("aB1\x00\n ", max_size=12), references=st.lists(st.text("aB1 ", min_size=1), min_size=1))
def test_scores_are_rulers_own(prediction: str, references: list[str]) -> None:
    """Its two measures as its evaluation states them, on a cleaned prediction."""
    text = clean(prediction)
    found = [1.0 if reference.lower() in text.lower() else 0.0 for reference in references]
    assert score(prediction, references) == sum(found) / len(found)
    assert score(prediction, references, "part") == max(found)


@given(
    prediction=st.text("ab1 ", max_size=12), rest=st.text("ab1 ", max_size=6), metric=st.sampled_from(["all", "part"])
)
def test_what_is_settled_stays_so_by_either_measure(prediction: str, rest: str, metric: Metric) -> None:
    references = ["a1", "11"]
    if settled(prediction, references, metric):
        for whole in (False, True):
            assert score(prediction + rest, references, metric, whole_numbers=whole) == 1
