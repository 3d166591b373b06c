"""Lists of known heads: retrieval scores in and out as JSON, and DuoAttention's patterns in."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropex.errors import DataError
from ropex.eval.files import write_whole

Scores = dict[tuple[int, int], float]


def write_scores(heads: Sequence[dict[str, Any]], path: Path) -> None:
    """Retrieval scores of probed heads as {"layer-head": [score]}, both counted from 0, as the lists of Wu et al.
    (2024) are written; a score is the `copies` of the shortest length."""
    scores = {}
    for head in heads:
        if "needle" not in head:
            raise DataError("no needles were planted, so there are no retrieval scores: give --needles 1 or more")
        first = next(iter(head["needle"].values()))
        scores[f"{head['layer']}-{head['head']}"] = [first["copies"]]
    write_whole(path, lambda part: part.write_text(json.dumps(scores) + "\n", encoding="utf-8"))


def read_scores(path: Path, heads: Sequence[dict[str, Any]]) -> list[float]:
    """The score of each of `heads` from a file: JSON as above (of several scores their mean), or DuoAttention's TSV, a
    line a layer and a number from 0 to 1 a key/value head, which counts for all of its queries.

    Raises DataError for a file that is neither, or that has other heads.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = _json(text) if text.lstrip().startswith("{") else _tsv(text)
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise DataError(f"{path} is no list of heads ({error}): give JSON of scores or DuoAttention's TSV") from None
    by_keys = not text.lstrip().startswith("{")
    places = [(head["layer"], head["kv_head" if by_keys else "head"]) for head in heads]
    if set(found) != set(places):
        raise DataError(
            f"{path} lists {len(found)} heads and this model has {len(set(places))} others: which is it of?"
        )
    return [found[place] for place in places]


def _json(text: str) -> Scores:
    out = {}
    for name, scores in json.loads(text).items():
        layer, head = name.split("-")
        values = scores if isinstance(scores, list) else [scores]
        out[int(layer), int(head)] = sum(values) / len(values)
    return out


def _tsv(text: str) -> Scores:
    lines = [line.split() for line in text.splitlines() if line.strip()]
    return {(layer, head): float(value) for layer, line in enumerate(lines) for head, value in enumerate(line)}
