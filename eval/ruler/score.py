"""RULER's scoring: the share of the references that a prediction holds."""

import math
import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """The prediction as scored: stripped, control characters made line breaks, stripped again."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def score(prediction: str, references: Sequence[str], *, whole_numbers: bool = False) -> float:
    """Share of the references, from 0 to 1, that occur in the prediction, whatever their case.

    This is RULER's measure; a number then also counts where it is part of a longer one. With
    `whole_numbers` it does not. Raises TypeError unless `references` is a list of strings, which a single
    string is not: it would be scored letter by letter.
    """
    if not isinstance(prediction, str) or isinstance(references, str):
        raise TypeError("score takes a string and a list of strings")
    if not references or not all(isinstance(reference, str) and reference for reference in references):
        raise TypeError("score needs one reference or more, each a string that is not empty")
    text = clean(prediction).lower()
    found = [_occurs(reference.lower(), text, whole_numbers) for reference in references]
    return sum(found) / len(found)


def settled(prediction: str, references: Sequence[str]) -> bool:
    """Whether nothing that follows can change either score: all is found, and no number can grow longer."""
    open_end = clean(prediction)[-1:].isdigit()
    return not open_end and score(prediction, references, whole_numbers=True) == 1.0


def wilson_interval(mean: float, samples: int) -> tuple[float, float]:
    """95% interval of a mean of shares (Wilson 1927). Exact scores of 0 and 1 give no zero-width interval.

    For partial scores it errs on the wide side, since a share varies less than a coin of the same mean.
    """
    z = 1.959964
    centre = (mean + z**2 / (2 * samples)) / (1 + z**2 / samples)
    half = z * math.sqrt(mean * (1 - mean) / samples + z**2 / (4 * samples**2)) / (1 + z**2 / samples)
    return max(0.0, centre - half), min(1.0, centre + half)


def _occurs(reference: str, text: str, whole_numbers: bool) -> bool:
    if whole_numbers and reference.isdigit():
        return re.search(rf"(?<!\d){re.escape(reference)}(?!\d)", text) is not None
    return reference in text
