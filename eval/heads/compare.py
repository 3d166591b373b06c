"""compare_heads: the same heads before and after, on the same text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropex.errors import OptionError
from ropex.eval.heads.probe import evaluate_heads


def compare_heads(before: str, after: str, data: Sequence[str | Path], lengths: Sequence[int], **asked: Any) -> dict:
    """Probe two checkpoints with one model's shape and put their heads side by side; `asked` goes to evaluate_heads.

    Returns {"kind": "heads compared", "before", "after": what evaluate_heads returns, "changes": [{"layer", "head",
    "from", "to"}] of the heads whose class is another, "relations"}. relations: rank correlations over the heads of
    `after` with a scale of their own, by length; see relations(). Errors: OptionError where the heads do not match.
    """
    found = [evaluate_heads(name, data, lengths, **asked) for name in (before, after)]
    old, new = (report["heads"] for report in found)
    if [(h["layer"], h["head"], h["kv_head"]) for h in old] != [(h["layer"], h["head"], h["kv_head"]) for h in new]:
        raise OptionError(f"{before} and {after} have other heads: compare checkpoints of one model")
    changes = [
        {"layer": a["layer"], "head": a["head"], "from": a["class"], "to": b["class"]}
        for a, b in zip(old, new, strict=True)
        if a["class"] != b["class"]
    ]
    return {
        "kind": "heads compared", "before": found[0], "after": found[1], "changes": changes,
        "relations": relations(old, new),
    }  # fmt: skip


def relations(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Rank correlations (Spearman) over heads, at each length, of what the papers relate; None without AdaRoPE.

    gamma_e2, tau_e2: of a head's gamma and tau with its E_2 after (AdaRoPE finds larger gamma where E_2 is small).
    e2_change: of E_2 before with the ratio of E_2 after to before: above 0 where far-looking heads reach farther and
    near-looking ones stay.
    """
    out: dict[str, dict[str, float | None]] = {}
    learned = [head for head in new if "adarope" in head]
    for length in new[0]["e2"]:
        reach = [head["e2"][length] for head in learned]
        ratio = [b["e2"][length] / a["e2"][length] for a, b in zip(old, new, strict=True)]
        out[length] = {f"{n}_e2": spearman([head["adarope"][n] for head in learned], reach) for n in ("gamma", "tau")}
        out[length]["e2_change"] = spearman([head["e2"][length] for head in old], ratio)
    return out


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation, ties by their mean rank; None for fewer than three pairs or a side that does not vary."""
    import numpy as np

    if len(x) < 3 or min(x) == max(x) or min(y) == max(y):
        return None

    def ranks(values: Sequence[float]) -> "np.ndarray":
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (counts.cumsum() - (counts - 1) / 2)[place]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])
