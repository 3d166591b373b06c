"""Which kind of head is it? One table of thresholds, and the order in which they are asked."""

from dataclasses import dataclass
from typing import Any

CLASSES = ("retrieval", "off-by-one", "local", "sink", "global", "mixed")


@dataclass(frozen=True)
class Thresholds:
    """Where a class begins; every one can be set by its name. The first that fits is taken, in this order.

    retrieval: while the answer to a planted needle is said, the least mean mass that lies on the needle, at
        the shortest length; and e2, the greatest E_2 of those queries, in tokens.
    off_by_one: least weight on the token before.
    local: least mass on the last 8 tokens.
    sink: least weight on the first token.
    global_growth: least growth exponent of E_2 with the length, and global_e2, the least E_2 at the longest, tokens.
    Masses are means over the queries of the longest length. A head that none fits is mixed.
    """

    retrieval: float = 0.3
    retrieval_e2: float = 4.0
    off_by_one: float = 0.5
    local: float = 0.5
    sink: float = 0.5
    global_growth: float = 0.4
    global_e2: float = 8.0


def classify(head: dict[str, Any], thresholds: Thresholds = Thresholds()) -> str:  # noqa: B008 (frozen)
    """The class of a head as the probe describes it; see Thresholds. Retrieval comes first, since such a head rests on
    the sink wherever there is nothing to find."""
    shortest, longest = list(head["e2"])[0], list(head["e2"])[-1]
    needle = head.get("needle", {}).get(shortest)
    if needle and needle["mass"] >= thresholds.retrieval and needle["e2"] <= thresholds.retrieval_e2:
        return "retrieval"
    if head["previous"][longest] >= thresholds.off_by_one:
        return "off-by-one"
    if head["local"][longest] >= thresholds.local:
        return "local"
    if head["sink"][longest] >= thresholds.sink:
        return "sink"
    grows = head["growth"] is not None and head["growth"] >= thresholds.global_growth
    return "global" if grows and head["e2"][longest] >= thresholds.global_e2 else "mixed"
