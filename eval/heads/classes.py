"""Which kind of head is it? One table of thresholds, and the order in which they are asked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ropex.errors import OptionError
from ropex.eval.heads.measures import growth

CLASSES = ("retrieval", "off-by-one", "local", "sink", "global", "mixed")


@dataclass(frozen=True)
class Thresholds:
    """Where a class begins; every one can be set by its name. The first that fits is taken, in this order.

    retrieval: while the answer to a planted needle is said, the least mean mass that lies on the needle, at
        the shortest length; and e2, the greatest E_2 of those queries, in tokens.
    off_by_one: least weight on the token before.
    local: least mass on the last 8 tokens.
    sink: least weight on the first token.
    global_growth: least growth exponent of E_2 with the length, over all lengths where no two are trained for; and
        global_e2, the least E_2, in tokens.
    Asked at the lengths that the model was trained for, if any were measured; masses are means over the queries of the
    longest of these. A head that none fits is mixed.
    """

    retrieval: float = 0.3
    retrieval_e2: float = 4.0
    off_by_one: float = 0.5
    local: float = 0.5
    sink: float = 0.5
    global_growth: float = 0.4
    global_e2: float = 8.0


_USUAL = Thresholds()


def thresholds(changes: Mapping[str, Any]) -> Thresholds:
    """The table with some of its values changed; OptionError for a name that it does not have, or no number."""
    names = [field.name for field in fields(Thresholds)]
    for name, value in changes.items():
        if name not in names or not isinstance(value, int | float):
            raise OptionError(f"--threshold {name}={value}: give a number for one of {', '.join(names)}")
    return Thresholds(**changes)


def classify(head: dict[str, Any], limits: Thresholds = _USUAL, window: int | None = None) -> str:
    """The class of a head as the probe describes it; see Thresholds. window: tokens that the model was trained for.
    Retrieval comes first, since such a head rests on the sink wherever there is nothing to find."""
    lengths = [length for length in head["e2"] if window is None or int(length) <= window] or list(head["e2"])
    shortest, longest = lengths[0], lengths[-1]
    needle = head.get("needle", {}).get(shortest)
    if needle and needle["mass"] >= limits.retrieval and needle["e2"] <= limits.retrieval_e2:
        return "retrieval"
    if head["previous"][longest] >= limits.off_by_one:
        return "off-by-one"
    if head["local"][longest] >= limits.local:
        return "local"
    if head["sink"][longest] >= limits.sink:
        return "sink"
    measured = lengths if len(lengths) > 1 else list(head["e2"])
    slope = growth([int(length) for length in measured], [head["e2"][length] for length in measured])
    grows = slope is not None and slope >= limits.global_growth
    return "global" if grows and head["e2"][longest] >= limits.global_e2 else "mixed"
