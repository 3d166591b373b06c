"""Text to hide facts in: cut at line ends, and woven together with lines that state and ask for the value of a key.

A line `[[wolf=4821]]` states the value of a key, and a later line `((wolf=4821))` asks for it.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from ropex.errors import DataError, OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORDS = (
    "acre bark barn bath bead beam bear bell belt bird boat bolt bone book boot bowl bull cage cake calf "
    "cave clay coal coat coin cork corn crab crow deer dish dove drum dusk fern fish flag flax foam fork "
    "frog gate goat gold hare harp hawk helm hill horn iron jade jest kiln kite knot lace lake lamb lamp "
    "lark leaf lily lion lock loom lute mare mask mill mint moss moth nail nest oven palm pear pine plum "
    "pond pool rail ring roof root rope rose ruby sail salt sand seal seed silk snow star stem swan tent "
    "toad tree vase veil vine wand well wing wolf wool worm yarn yoke"
)
KEYS = tuple(_WORDS.split())
DIGITS = 4
_LONGEST = 240  # characters of a line that stays whole


@dataclass(frozen=True)
class Haystack:
    """Text as token ids [N], and where its lines end (offsets into the ids, ascending)."""

    ids: list[int]
    ends: list[int]


def statement(key: str, value: str) -> str:
    """The line that states a value."""
    return f"[[{key}={value}]]\n"


def query(key: str, value: str) -> str:
    """The line that asks for a value that was stated, and answers."""
    return f"(({key}={value}))\n"


def encode_lines(tokenizer: PreTrainedTokenizerBase, text: str) -> Haystack:
    """Tokenise a text line by line, so that whole lines can be put between its lines."""
    ids: list[int] = []
    ends: list[int] = []
    for line in tokenizer([*_lines(text)], add_special_tokens=False, verbose=False)["input_ids"]:
        ids += line
        ends.append(len(ids))
    return Haystack(ids, ends)


def shipped_text() -> str:
    """The play that ships with ropex and that nothing here trains on."""
    return (files("ropex.demo") / "text" / "dev.txt").read_text(encoding="utf-8")


def stretch(haystack: Haystack, room: int, rng: random.Random) -> Haystack:
    """A stretch of exactly `room` tokens that ends where a line ends; its first line may lack its start."""
    if room < 1:
        raise OptionError(f"the lines leave {room} tokens for text: ask for a greater length or fewer keys")
    first = bisect_left(haystack.ends, room)
    if first == len(haystack.ends):
        raise DataError(f"the text has {len(haystack.ids)} tokens and {room} are needed: give a longer text")
    last = rng.randrange(first, len(haystack.ends))
    start = haystack.ends[last] - room
    ends = haystack.ends[bisect_right(haystack.ends, start) : last + 1]
    return Haystack(haystack.ids[start : start + room], [end - start for end in ends])


def weave(text: Haystack, inserts: Sequence[tuple[float, list[int]]]) -> tuple[list[int], list[int]]:
    """Put each insert, given in order of depth (0 to 1), at the line end nearest before that depth.

    Returns the ids, and where in them each insert begins.
    """
    ids: list[int] = []
    places: list[int] = []
    done = 0
    for depth, insert in inserts:
        reached = bisect_right(text.ends, depth * len(text.ids))
        offset = text.ends[reached - 1] if reached else 0
        ids += text.ids[done:offset]
        places.append(len(ids))
        ids += insert
        done = offset
    return ids + text.ids[done:], places


def _lines(text: str) -> Iterator[str]:
    """Lines, and long ones in pieces that begin before a space, so that there are places enough to put a needle."""
    for line in text.splitlines(keepends=True):
        while len(line) > _LONGEST and (cut := line.rfind(" ", 1, _LONGEST)) > 0:
            yield line[:cut]
            line = line[cut:]
        yield line
