"""Text with facts in it that are stated once and asked for later: for training, and for `ropex eval recall`.

A fact has a format: how it is stated, and how it is asked for in other words and answered. A quote is a line of the
text itself, so that not all that is retrieved is made up. Text, statements and questions meet at line ends only.

Symbols: T tokens in a window.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropex.errors import DataError, OptionError
from ropex.haystack import DIGITS, KEYS, Haystack, query, statement

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_PER_FACT = 128
ASKS = 2  # of each fact
_NEAREST = 1 / 16  # of the rest of the window: the shortest distance that second questions are drawn from
_CODE, _CODE_LENGTH = "BCDFGHJKLMNPQRSTVWXZ23456789", 6  # no vowels: no words
_QUOTED = 6  # tokens of a quote that are given, and as many that are asked for


@dataclass(frozen=True)
class Format:
    """Two lines with a {key} and a {value}. code: the value is letters and digits, not DIGITS digits. Without a line
    that states it, the value is a quote: a line of the text, cue and answer, which `asked` alone says again."""

    stated: str | None
    asked: str
    code: bool = False


LINES = Format(statement("{key}", "{value}"), query("{key}", "{value}"))

MEASURED = {
    "lines": LINES,
    "sentence": Format("The number of the {key} is {value}.\n", "Remember that the {key} has the number {value}.\n"),
    "code": Format('access["{key}"] = "{value}"\n', 'assert access["{key}"] == "{value}"\n', code=True),
    "quote": Format(None, "It was said before:\n{value}\n"),
}
"""What `ropex eval recall` asks in. Training has formats of its own: it is not measured by what it rehearsed."""


@dataclass(frozen=True)
class Question:
    """format: its name. start, end: the answer's tokens in the window, start <= p < end. distance: how many
    tokens before them the same answer was last said."""

    format: str
    start: int
    end: int
    distance: int


@dataclass(frozen=True)
class Quiz:
    """ids [T], BOS included; questions in the order of their places; text: places of the text that was there before;
    stated: those of values that are stated, which nothing before them tells."""

    ids: list[int]
    questions: list[Question]
    text: list[int]
    stated: list[int]


_Line = tuple[list[int], list[int], list[int]]  # the ids up to the value, of the value, and after it


@dataclass(frozen=True)
class _Insert:
    """A line that goes in at an offset of the text. answer: where in `ids` the answer is."""

    offset: int
    fact: int
    ids: list[int]
    answer: range
    asked: bool


def check_formats(formats: Sequence[str]) -> None:
    """OptionError unless they are names of MEASURED, each once."""
    if not formats or len(set(formats)) < len(formats) or set(formats) - set(MEASURED):
        raise OptionError(f"formats are {', '.join(formats) or 'missing'}: choose of {', '.join(MEASURED)}, each once")


def facts_in(length: int, formats: Mapping[str, Format]) -> int:
    """How many facts of each format a window of so many tokens has."""
    most = length // TOKENS_PER_FACT // len(formats)
    keyed = sum(format.stated is not None for format in formats.values())
    return max(1, min(most, len(KEYS) // keyed) if keyed else most)


def anywhere(rng: random.Random) -> tuple[float, list[float]]:
    """Where a fact is stated and where it is asked for, as shares of the text: first at a distance that is uniform over
    the window."""
    distance = rng.random()
    start = rng.random() * (1 - distance)
    return start, asked_from(start + distance, rng)


def asked_from(first: float, rng: random.Random) -> list[float]:
    """The places of a fact's questions, the later ones anywhere after the first."""
    return [first, *(first + (1 - first) * _NEAREST ** rng.random() for _ in range(ASKS - 1))]


def make_quiz(
    tokenizer: PreTrainedTokenizerBase,
    read: Callable[[int, random.Random], Haystack],
    length: int,
    formats: Mapping[str, Format],
    rng: random.Random,
    bos: Sequence[int] = (),
    depths: Callable[[random.Random], tuple[float, list[float]]] = anywhere,
) -> Quiz:
    """A window of exactly T = `length` tokens; a pure function of its arguments and what `rng` gives.

    read: so many tokens of text. depths: of one fact, as `anywhere` gives them, with ASKS questions. Raises OptionError
    where the facts leave no room for text, DataError where the text has too few lines that can be quoted.
    """
    facts = [name for name in formats for _ in range(facts_in(length, formats))]
    lines = _lines(tokenizer, [formats[name] for name in facts], rng)
    shares = [depths(rng) for _ in facts]
    used = sum(_tokens(stated) + ASKS * _tokens(asked) for stated, asked in lines)
    text = read(length - len(bos) - used, rng)
    quotable = _quotable(text)

    inserts: list[_Insert] = []
    said: dict[int, int] = {}  # of a quote: the text offset of its answer
    for fact, ((stated, (head, value, tail)), (start, asks)) in enumerate(zip(lines, shares, strict=True)):
        if stated:
            earliest = _line_end(text, start * len(text.ids))
            inserts.append(_Insert(earliest, fact, *_joined(stated), asked=False))
        else:
            first = _take(quotable, start * len(text.ids))
            said[fact] = first + _QUOTED
            earliest = text.ends[bisect_right(text.ends, first)]
            head, value = [*head[:-_QUOTED], *text.ids[first : said[fact]]], text.ids[said[fact] : said[fact] + _QUOTED]
        ids, answer = _joined((head, value, tail))
        inserts += [
            _Insert(max(earliest, _line_end(text, at * len(text.ids))), fact, ids, answer, asked=True) for at in asks
        ]
    return _woven(bos, text, facts, said, sorted(inserts, key=lambda i: (i.offset, i.asked)))


def _woven(bos: Sequence[int], text: Haystack, facts: list[str], said: dict[int, int], inserts: list[_Insert]) -> Quiz:
    """The text with all inserts, given in their order, in it."""
    ids, questions, done = [*bos], [], 0
    places: list[int] = []
    stated: list[int] = []
    last: dict[int, int] = {}  # of each fact: where its answer was last said
    for insert in [*inserts, None]:
        offset = insert.offset if insert else len(text.ids)
        last |= {fact: len(ids) + at - done for fact, at in said.items() if done <= at < offset}
        places += range(len(ids), len(ids) + offset - done)
        ids += text.ids[done:offset]
        done = offset
        if insert:
            start, end = len(ids) + insert.answer.start, len(ids) + insert.answer.stop
            if insert.asked:
                questions.append(Question(facts[insert.fact], start, end, start - last[insert.fact]))
            else:
                stated += range(start, end)
            last[insert.fact] = start
            ids += insert.ids
    return Quiz(ids, questions, places, stated)


def _lines(
    tokenizer: PreTrainedTokenizerBase, formats: Sequence[Format], rng: random.Random
) -> list[tuple[_Line | None, _Line]]:
    """For each fact the line that states it, and the one that asks for it. Keys and values differ; a quote's is filled
    in later."""
    keyed = sum(format.stated is not None for format in formats)
    keys, numbers = iter(rng.sample(KEYS, keyed)), iter(rng.sample(range(10**DIGITS), keyed))
    found: list[tuple[_Line | None, _Line]] = []
    for format in formats:
        if format.stated is None:
            head, tail = (tokenizer.encode(part, add_special_tokens=False) for part in format.asked.split("{value}"))
            found.append((None, ([*head, *[0] * _QUOTED], [0] * _QUOTED, tail)))
            continue
        value = "".join(rng.choices(_CODE, k=_CODE_LENGTH)) if format.code else f"{next(numbers):0{DIGITS}d}"
        line = {"key": next(keys), "value": value}
        parts = [part for form in (format.stated, format.asked) for part in form.format_map(line).partition(value)]
        ids = tokenizer(parts, add_special_tokens=False)["input_ids"]
        found.append(((ids[0], ids[1], ids[2]), (ids[3], ids[4], ids[5])))
    return found


def _tokens(line: _Line | None) -> int:
    return sum(map(len, line or ()))


def _joined(line: _Line) -> tuple[list[int], range]:
    """A line's ids, and where in them the value's are."""
    head, value, tail = line
    return [*head, *value, *tail], range(len(head), len(head) + len(value))


def _line_end(text: Haystack, place: float) -> int:
    """The last end of a line up to a place, or the text's start."""
    reached = bisect_right(text.ends, place)
    return text.ends[reached - 1] if reached else 0


def _quotable(text: Haystack) -> list[int]:
    """Where lines begin that are long enough to quote, and whose words the text has nowhere else, in order."""
    parts = list(zip(*(text.ids[i:] for i in range(_QUOTED)), strict=False))
    times = Counter(parts)
    lines = zip(text.ends, text.ends[1:], strict=False)
    long = [start for start, end in lines if end - start > 2 * _QUOTED]
    return [start for start in long if times[parts[start]] == times[parts[start + _QUOTED]] == 1]


def _take(quotable: list[int], place: float) -> int:
    """The line nearest before a place, or the first one, which is then taken."""
    if not quotable:
        raise DataError("the text has too few lines long enough to quote: give other text, or leave 'quote' out")
    return quotable.pop(max(0, bisect_right(quotable, place) - 1))
