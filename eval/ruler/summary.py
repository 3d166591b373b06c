"""From scores of samples to the table: means, their intervals, and the effective length."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

PASSING = 85.6
"""Percent: Llama 2 7B's mean at 4k, which RULER holds a length to (Hsieh et al. 2024)."""

_RESAMPLES = 2000


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table from the answers of one checkpoint, length and task."""
    scores = [record["score"] for record in records]
    cut_off = [record["stop"] == "limit" and record["score"] < 1 for record in records]
    return {
        **{name: records[0][name] for name in ("checkpoint", "method", "length", "task")},
        "score": _percent(fmean(scores)),
        "interval": [_percent(bound) for bound in interval([scores])],
        "score_whole_numbers": _percent(fmean(record["score_whole_numbers"] for record in records)),
        "samples": len(records),
        "fill": fmean(record["fill"] for record in records),
        "truncated": fmean(cut_off),
    }


def means(scores: dict[tuple[str, str, int], dict[str, list[float]]]) -> list[dict[str, Any]]:
    """For each checkpoint and method the mean over tasks at each length, and the effective length.

    scores: by (checkpoint, method, length) the samples' scores of each task. The effective length is the longest whose
    mean is at least 85.6; None where none is.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (checkpoint, method, length), tasks in scores.items():
        groups = list(tasks.values())
        row = {
            "length": length,
            "mean": _percent(fmean(map(fmean, groups))),
            "interval": [_percent(bound) for bound in interval(groups)],
            "tasks": len(groups),
        }
        found.setdefault((checkpoint, method), []).append(row)
    return [
        {
            "checkpoint": checkpoint,
            "method": method,
            "effective_length": max((row["length"] for row in rows if row["mean"] >= PASSING), default=None),
            "lengths": rows,
        }
        for (checkpoint, method), rows in found.items()
    ]


def interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95% interval of the mean of the groups' means: percentile bootstrap, samples drawn anew within each group.

    Where no group's scores differ among themselves, drawing anew says nothing: Wilson's interval of that mean then, so
    that twenty right answers of twenty are not taken for certainty. Fixed seed.
    """
    if all(len(set(group)) == 1 for group in groups):
        return wilson_interval(fmean(map(fmean, groups)), sum(map(len, groups)))
    draw = np.random.default_rng(0)
    drawn = np.zeros(_RESAMPLES)
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        drawn += values[draw.integers(len(values), size=(_RESAMPLES, len(values)))].mean(1)
    low, high = np.percentile(drawn / len(groups), [2.5, 97.5])
    return float(low), float(high)


def wilson_interval(mean: float, samples: int) -> tuple[float, float]:
    """95% interval of a mean of shares (Wilson 1927). Exact scores of 0 and 1 give no zero-width interval."""
    z = 1.959964
    centre = (mean + z**2 / (2 * samples)) / (1 + z**2 / samples)
    half = z * math.sqrt(mean * (1 - mean) / samples + z**2 / (4 * samples**2)) / (1 + z**2 / samples)
    return max(0.0, centre - half), min(1.0, centre + half)


def _percent(share: float) -> float:
    return round(100 * share, 6)
