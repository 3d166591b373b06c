"""Recall text: windows of the user's text with facts put in, each stated once and asked for later.

Text alone seldom asks for what was said thousands of tokens before, so a short training leaves retrieval to chance.
Formats are others than those that `ropex eval recall` measures with, but for the lines that nano knows.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ropex.errors import RopexError
from ropex.facts import LINES, Format, anywhere, asked_from, make_quiz
from ropex.haystack import Haystack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAUGHT = {
    "lines": LINES,
    "noted": Format("The {key}'s figure: {value}.\n", "As was noted, for the {key} the figure was {value}.\n"),
    "record": Format('{{"{key}": "{value}"}},\n', '> get {key}\n"{value}"\n', code=True),
    "table": Format("{key}\t{value}\n", "{key} -> {value}\n", code=True),
    "repeat": Format(None, "To repeat:\n{value}\n"),
}
_AT_ONCE = 3  # formats in a window
_SHORTEST = 256  # tokens: in a shorter window the facts would be more than the text
_TRIES = 8  # draws of formats, of which one may want more lines to quote than a stretch of text has
_ACROSS = 0.75  # of the facts of a window whose positions jump: asked for in a later piece than stated
_LINE = 64  # tokens without a line end, after which one is taken between two words
_WORD = ("Ġ", "▁", " ")  # how tokens begin that begin a word


def with_facts(
    tokenizer: "PreTrainedTokenizerBase",
    read: Callable[[np.ndarray], np.ndarray],
    positions: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A window [T] of text with facts in it: its tokens, positions, and whether what stands before tells each token.

    positions [T]: which a window without facts would have, in pieces; this one has as many, cut at the same shares of
    it. read: the text at some positions. Nothing tells a value where it is stated. Where the text has no room for
    facts, a window without them.
    """
    window, draw = len(positions), random.Random(int(rng.integers(2**62)))
    if window < _SHORTEST:
        return read(positions), positions, np.ones(window, dtype=bool)
    skipped = positions - np.arange(window)
    cuts = [*(np.flatnonzero(np.diff(skipped)) + 1) / window, 1.0]
    for _ in range(_TRIES):
        formats = {name: TAUGHT[name] for name in draw.sample(list(TAUGHT), _AT_ONCE)}

        def text(tokens: int, _: random.Random) -> Haystack:
            ids = read(_shortened(skipped, tokens))
            return Haystack(ids.tolist(), _line_ends(tokenizer, ids))

        try:
            quiz = make_quiz(tokenizer, text, window, formats, draw, depths=lambda rng: _depths(rng, cuts))
        except RopexError:
            continue
        places, kept = np.arange(window), np.array(quiz.text)
        before = np.searchsorted(kept, places, side="right").clip(1) - 1  # a fact goes with the text before it
        told = np.ones(window, dtype=bool)
        told[quiz.stated] = False
        return np.array(quiz.ids), places + (_shortened(skipped, len(kept)) - np.arange(len(kept)))[before], told
    return read(positions), positions, np.ones(window, dtype=bool)


def _shortened(skipped: np.ndarray, tokens: int) -> np.ndarray:
    """Positions of fewer tokens than `skipped` has, with the same jumps at the same shares of them."""
    places = np.arange(tokens)
    return places + skipped[places * len(skipped) // tokens]


def _depths(rng: random.Random, cuts: list[float]) -> tuple[float, list[float]]:
    """Where a fact is stated and asked for, as shares of the window: mostly in two pieces of it, cut at `cuts`."""
    if len(cuts) == 1 or rng.random() >= _ACROSS:
        return anywhere(rng)
    stated = rng.uniform(0, cuts[-2])
    return stated, asked_from(rng.uniform(next(cut for cut in cuts if cut > stated), 1), rng)


def _line_ends(tokenizer: "PreTrainedTokenizerBase", ids: np.ndarray) -> list[int]:
    """Offsets after tokens that hold a line end, and in long lines before tokens that begin a word."""
    names = list(tokenizer.convert_ids_to_tokens(ids.tolist()))
    ends: list[int] = []
    for place, text in enumerate(tokenizer.batch_decode(ids[:, None].tolist())):
        if place - (ends[-1] if ends else 0) >= _LINE and names[place].startswith(_WORD):
            ends.append(place)
        if "\n" in text:
            ends.append(place + 1)
    return ends
