"""What a RULER task is: a prompt of any number of units (lines, words, draws) and what a right answer holds.

A draft depends on nothing but its units and its `Request`; the sizing in `prompts` picks the units that fill the
length.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ropex.errors import OptionError
from ropex.eval.ruler.flavours import Flavour
from ropex.eval.ruler.sources import Sources
from ropex.eval.ruler.wording import Wording, load_wording

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Request:
    """Which sample is wanted, for which length in tokens; `count` gives the tokens of a piece of text."""

    task: str
    length: int
    seed: int
    index: int
    count: Callable[[str], int]
    flavour: Flavour
    sources: Sources
    kept: dict[str, Any] = field(default_factory=dict)  # what drafts of the same sample need not draw again

    @property
    def wording(self) -> Wording:
        return load_wording(self.flavour.nvidia_wording)

    def rng(self, purpose: str = "") -> random.Random:
        """A generator of its own for each sample and purpose, the same in every process."""
        return random.Random(f"{self.task} {self.length} {self.seed} {self.index} {purpose}")

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once a sample."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def depth(self) -> float:
        """From 0 to 1, in golden-ratio steps of the index, so that a few samples already cover the window."""
        return (random.Random(self.seed).random() + self.index * _GOLDEN) % 1


@dataclass(frozen=True)
class Draft:
    """A prompt in the making."""

    text: str
    prefix: str  # the first words of the answer, given to the model
    references: list[str]  # the strings that a right answer holds
    delimiter: str = " "  # between text and prefix where no chat template stands between them
    facts: dict[str, float] = field(default_factory=dict)  # kept with the sample's result


@dataclass(frozen=True)
class Task:
    """How to draft a task, and within which units.

    bounds: the fewest and the most units of a request. grid: of a length, where lm-eval starts and the steps that it
    goes in. metric: the mean share of references found, or the best reference alone. needs: the data that it reads.
    recurs: a sample's few words recur in it, so that these tell its tokens and not its characters.
    """

    name: str
    tokens_to_generate: int
    draft: Callable[[int, Request], Draft]
    bounds: Callable[[Request], tuple[int, int]]
    grid: Callable[[int], tuple[int, int]]
    metric: Literal["all", "part"] = "all"
    needs: Literal["essays", "squad", "hotpot"] | None = None
    recurs: bool = False

    def on_grid(self, units: int, request: Request) -> int:
        """The units that the request's flavour takes where as many as `units` fit."""
        if not request.flavour.coarse:
            return units
        start, step = self.grid(request.length)
        low, _ = self.bounds(request)
        return max(low, units - (units - start) % step if units >= start else 0)

    def after(self, units: int, request: Request) -> int:
        """The next larger number of units that the request's flavour may take."""
        if not request.flavour.coarse:
            return units + 1
        start, step = self.grid(request.length)
        return units + step - (units - start) % step if units >= start else start


def drawn(count: int, rng: random.Random) -> Iterator[int]:
    """The numbers below `count` in an order drawn as far as it is read (Fisher and Yates's)."""
    moved: dict[int, int] = {}
    for i in range(count):
        j = rng.randrange(i, count)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


class TooShortError(OptionError):
    """No prompt of the task fits the length, or none fills it. longer: tokens that will do, or were tried last."""

    def __init__(self, message: str, longer: int) -> None:
        super().__init__(message)
        self.longer = longer
