"""Needles in a haystack: eight tasks of one shape."""

import random
import uuid
from dataclasses import dataclass
from typing import Literal

from ropex.eval.ruler.draft import Draft, Request
from ropex.eval.ruler.sources import Essays
from ropex.eval.ruler.wording import load_words

Kind = Literal["words", "numbers", "uuids"]
_FEW_ESSAYS = 1  # words: the fewest of a haystack


@dataclass(frozen=True)
class Niah:
    """The needles of a task: how many keys, how many values each, how many keys are asked for, and what they are."""

    haystack: Literal["noise", "essay", "needle"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def needles(self) -> int:
        return self.keys * self.values

    def bounds(self, request: Request) -> tuple[int, int]:
        """Units: words of essays, else lines. A line has five tokens or more; a needle two and a value."""
        if self.haystack != "essay":
            return self.needles, max(self.needles, request.length)
        words = _essays(request).words
        return _FEW_ESSAYS, 4 * request.length if request.flavour.repeats else min(words, 4 * request.length)

    def grid(self, length: int) -> tuple[int, int]:
        return 0, 500 if self.haystack == "essay" else 5 if length < 4096 else 25

    def draft(self, units: int, request: Request) -> Draft:
        """Needles in `units` words of essays, equal noise lines, or needles of other keys.

        The depth of the first needle asked for goes through the window with the index; others lie at random.
        """
        wording = request.wording
        keys, values = request.keep("needles", lambda: self._draw(request))
        rng = request.rng("order")
        asked = rng.sample(range(self.keys), self.queries)
        needles = [(key, self._line(request, keys[key], value)) for key in range(self.keys) for value in values[key]]
        first = next(i for i, (key, _) in enumerate(needles) if key == asked[0])
        depths = [rng.random() for _ in needles]
        depths[first] = request.depth()
        lines = sorted(zip(depths, [text for _, text in needles], strict=True))
        body = self._essay(units, request, lines) if self.haystack == "essay" else self._lines(units, request, lines)
        one = self.queries * self.values == 1
        kind = self.value.removesuffix("s") if one else self.value
        query = _listed([keys[i] for i in asked])
        template, prefix = (
            (wording.niah_template_one, wording.niah_prefix_one)
            if one
            else (wording.niah_template, wording.niah_prefix)
        )
        head, tail = template.split("{context}")
        return Draft(
            text=head.format(type_needle_v=kind) + body + tail.format(type_needle_v=kind, query=query),
            prefix=prefix.format(kind, query),
            references=[value for i in asked for value in values[i]],
            facts={"depth": depths[first]},
        )

    def _draw(self, request: Request) -> tuple[list[str], list[list[str]]]:
        rng = request.rng()
        keys = _distinct(rng, self.key, self.keys)
        values = _distinct(rng, self.value, self.needles)
        return keys, [values[i * self.values : (i + 1) * self.values] for i in range(self.keys)]

    def _line(self, request: Request, key: str, value: str) -> str:
        return request.wording.niah_needle.format(type_needle_v=self.value, key=key, value=value)

    def _essay(self, words: int, request: Request, needles: list[tuple[float, str]]) -> str:
        """Sentences with the needles between them."""
        return " ".join(_insert(_essays(request).first(words), needles))

    def _lines(self, units: int, request: Request, needles: list[tuple[float, str]]) -> str:
        lines = [request.wording.niah_noise] * units if self.haystack == "noise" else self._others(units, request)
        return "\n".join(_insert(lines, needles))

    def _others(self, units: int, request: Request) -> list[str]:
        """Needles that nobody asks for; the first ones stay the same as they grow in number."""
        rng, lines, taken = request.keep("others", lambda: (request.rng("others"), [], set(request.kept["needles"][0])))
        while len(lines) < units:
            key = _one(rng, self.key)
            if key not in taken:
                taken.add(key)
                lines.append(self._line(request, key, _one(rng, self.value)))
        return list(lines[:units])


def _essays(request: Request) -> Essays:
    assert request.sources.essays is not None  # asked for before any draft
    return request.sources.essays


def _insert(lines: list[str], needles: list[tuple[float, str]]) -> list[str]:
    """The lines with each needle, given in order of depth (0 to 1), between those before and after its depth."""
    woven: list[str] = []
    done = 0
    for depth, needle in needles:
        place = int(depth * (len(lines) + 1))
        woven += [*lines[done:place], needle]
        done = place
    return woven + lines[done:]


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def _distinct(rng: random.Random, kind: Kind, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[_one(rng, kind)] = None
    return list(found)


def _one(rng: random.Random, kind: Kind) -> str:
    if kind == "words":
        words = load_words()
        return f"{rng.choice(words['adjective'])}-{rng.choice(words['noun'])}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
