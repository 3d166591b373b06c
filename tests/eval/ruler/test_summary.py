"""Means, intervals and the effective length."""

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropex.eval.ruler.summary import interval, means, wilson_interval


@given(hits=st.integers(0, 40), samples=st.integers(1, 40))
def test_the_interval_holds_the_mean_within_bounds(hits: int, samples: int) -> None:
    scores = [1.0] * min(hits, samples) + [0.0] * (samples - min(hits, samples))
    low, high = interval([scores])
    assert 0 <= low <= fmean(scores) + 1e-12
    assert fmean(scores) - 1e-12 <= high <= 1
    assert high - low > 0 or samples == 1


def test_equal_scores_get_wilsons_interval() -> None:
    """Known values: 8 of 10 and 0 of 20."""
    assert [round(x, 4) for x in wilson_interval(0.8, 10)] == [0.4902, 0.9433]
    low, high = interval([[0.0] * 20])
    assert low == 0
    assert math.isclose(high, 0.1611, abs_tol=1e-4)
    assert interval([[1.0] * 20])[0] == pytest.approx(1 - high)


def test_the_bootstrap_agrees_with_the_standard_error() -> None:
    rng = random.Random(0)
    scores = [rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]) for _ in range(400)]
    low, high = interval([scores])
    mean = fmean(scores)
    error = math.sqrt(fmean((score - mean) ** 2 for score in scores) / len(scores))
    assert low == pytest.approx(mean - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.15 * error)
    assert interval([scores]) == (low, high)


def test_samples_are_drawn_within_their_task() -> None:
    """Two tasks that are sure of 0 and 1 leave half a point for the third alone to vary."""
    low, high = interval([[0.0] * 50, [1.0] * 50, [0.0, 1.0] * 25])
    assert (1 + 0.3) / 3 < low < 0.5 < high < (1 + 0.7) / 3


def test_tasks_weigh_alike_and_the_effective_length_is_the_longest_that_passes() -> None:
    scores = {
        ("a", "rope", 4096): {"vt": [1.0, 1.0], "cwe": [0.8] * 5},
        ("a", "rope", 8192): {"vt": [0.5], "cwe": [0.5]},
        ("a", "rope", 16384): {"vt": [0.9], "cwe": [0.812]},
        ("b", "yarn", 4096): {"vt": [0.855]},
    }
    first, second = means(scores)
    assert [(row["length"], row["mean"], row["tasks"]) for row in first["lengths"]] == [
        (4096, 90.0, 2), (8192, 50.0, 2), (16384, 85.6, 2),
    ]  # fmt: skip
    assert (first["checkpoint"], first["method"], first["effective_length"]) == ("a", "rope", 16384)
    assert second["effective_length"] is None
