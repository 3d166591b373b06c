"""RULER's scoring: the share of the references that a prediction holds, or the best one."""

import re
from collections.abc import Sequence
from typing import Literal

Metric = Literal["all", "part"]

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """The prediction as scored: stripped, control characters made line breaks, stripped again."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def score(prediction: str, references: Sequence[str], metric: Metric = "all", *, whole_numbers: bool = False) -> float:
    """From 0 to 1: the share of the references that occur in the prediction, whatever their case, or the best of them.

    "all" is the share; "part", for questions, is 1 where any reference occurs. These are RULER's measures; a number
    then also counts where it is part of a longer one. With `whole_numbers` it does not. Raises TypeError unless
    `references` is a list of strings, which a single string is not: it would be scored letter by letter.
    """
    if not isinstance(prediction, str) or isinstance(references, str):
        raise TypeError("score takes a string and a list of strings")
    if not references or not all(isinstance(reference, str) and reference for reference in references):
        raise TypeError("score needs one reference or more, each a string that is not empty")
    text = clean(prediction).lower()
    found = [_occurs(reference.lower(), text, whole_numbers) for reference in references]
    return float(any(found)) if metric == "part" else sum(found) / len(found)


def settled(prediction: str, references: Sequence[str], metric: Metric = "all") -> bool:
    """Whether nothing that follows can change either score: all is found, and no number can grow longer."""
    open_end = clean(prediction)[-1:].isdigit()
    return not open_end and score(prediction, references, metric, whole_numbers=True) == 1.0


def _occurs(reference: str, text: str, whole_numbers: bool) -> bool:
    if whole_numbers and reference.isdigit():
        return re.search(rf"(?<!\d){re.escape(reference)}(?!\d)", text) is not None
    return reference in text
