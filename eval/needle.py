"""Key-value retrieval inside text: one format for training documents and for the needle test.

A line `[[wolf=4821]]` states the value of a key, and a later line `((wolf=4821))` asks for it: whoever has read
the first can say the digits of the second. The brackets tell which digits can be known, so that nobody learns to
recall what was never said. Text, statements and queries meet at line ends only.

Symbols: L tokens in a window or document, S samples. All lengths are in tokens and count the BOS.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropex.errors import OptionError
from ropex.haystack import DIGITS, KEYS, Haystack, encode_lines, query, statement, stretch, weave

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS_PER_DISTRACTOR = 32
_NEAREST = 1 / 64  # of the rest of a document: the shortest distance that further queries are drawn from
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, fill the unit interval evenly


@dataclass(frozen=True)
class Sample:
    """One retrieval: `prompt` + `answer` fill the window; `depth` is the needle's, from 0 to 1."""

    prompt: list[int]
    answer: list[int]
    depth: float


@dataclass(frozen=True)
class Document:
    """Token ids [L], with the positions of the digits that are new and of those that can be recalled."""

    ids: list[int]
    stated: list[int]
    asked: list[int]


def needle_sample(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    index: int,
    seed: int = 0,
    distractors: int | None = None,
) -> Sample:
    """Text that holds one needle line among `distractors` others, and ends in the query for the needle.

    By default there is one distractor for every 32 tokens, so that a longer window holds more to confuse.
    `prompt` and `answer` have exactly L = `length` tokens together. The same (seed, length, index) gives the
    same sample; successive indices move the needle over all depths, from the first line to the last.
    Raises OptionError where L leaves no room for text, DataError where the text is shorter than that.
    """
    rng = random.Random(f"needle {seed} {length} {index}")
    depth = (rng.random() / 40 + _GOLDEN * index + random.Random(f"depth {seed}").random()) % 1.0
    if distractors is None:
        distractors = min(length // TOKENS_PER_DISTRACTOR, len(KEYS) - 1)
    stated, asked = _draw_lines(tokenizer, rng, distractors + 1)
    head, answer, _ = asked[0]
    bos = _bos(tokenizer)
    room = length - len(bos) - sum(len(part) for line in stated for part in line) - len(head) - len(answer)
    depths = [depth] + [rng.random() for _ in range(distractors)]
    inserts = sorted((at, sum(line, [])) for at, line in zip(depths, stated, strict=True))
    body, _ = weave(stretch(haystack, room, rng), inserts)
    return Sample([*bos, *body, *head], answer, depth)


def mixed_document(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    pairs: int,
    seed: int | str = 0,
    asks: int = 1,
) -> Document:
    """A training document of exactly L = `length` tokens: text with `pairs` keys stated and asked for in it.

    The distance from a statement to its first query is uniform over the document; a third of the keys are
    asked for twice, or all of them `asks` times if that is more than 1, at distances of every scale. `pairs` is at
    most len(KEYS). Raises as `needle_sample` does.
    """
    rng = random.Random(f"document {seed} {length}")
    if not 0 <= pairs <= len(KEYS):
        raise OptionError(f"{pairs} keys asked for: give a number from 0 to {len(KEYS)}")
    events: list[tuple[float, int, bool]] = []
    for pair in range(pairs):
        distance = rng.random()
        start = rng.random() * (1 - distance)
        events += [(start, pair, False), (start + distance, pair, True)]
        if asks > 1:  # near and far alike, or a model takes what it meets early for something new
            events += [(start + (1 - start) * _NEAREST ** rng.random(), pair, True) for _ in range(asks - 1)]
        elif rng.random() < 1 / 3:
            events.append((rng.uniform(start, 1), pair, True))
    events.sort()
    lines = _draw_lines(tokenizer, rng, pairs)
    bos = _bos(tokenizer)
    inserts = [(at, lines[asked][pair]) for at, pair, asked in events]
    room = length - len(bos) - sum(len(part) for _, line in inserts for part in line)
    body, places = weave(stretch(haystack, room, rng), [(at, sum(line, [])) for at, line in inserts])
    document = Document([*bos, *body], [], [])
    for place, (_, (head, value, _)), (_, _, asked) in zip(places, inserts, events, strict=True):
        first = len(bos) + place + len(head)
        (document.asked if asked else document.stated).extend(range(first, first + len(value)))
    return document


def needle_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    length: int,
    samples: int = 40,
    seed: int = 0,
    batch_tokens: int = 8192,
) -> float:
    """The share of S = `samples` needles whose digits greedy decoding gives exactly, at L = `length` tokens.

    Greedy decoding says the whole answer exactly when, with the right digits before it, each digit is the
    most likely token: one forward pass over the window tells.
    """
    import torch

    haystack = encode_lines(tokenizer, text)
    drawn = [needle_sample(tokenizer, haystack, length, index, seed) for index in range(samples)]
    step, right = max(1, batch_tokens // length), 0
    for start in range(0, samples, step):
        batch = drawn[start : start + step]
        ids = torch.tensor([[*sample.prompt, *sample.answer] for sample in batch], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=DIGITS + 1).logits[:, :-1]
        hits = logits.argmax(-1) == ids[:, -DIGITS:]
        right += sum(bool(row[-len(sample.answer) :].all()) for row, sample in zip(hits, batch, strict=True))
    return right / samples


_Line = tuple[list[int], list[int], list[int]]  # the ids up to the value, of its digits, and after them


def _draw_lines(tokenizer: PreTrainedTokenizerBase, rng: random.Random, count: int) -> tuple[list[_Line], list[_Line]]:
    """`count` keys that differ, with values that differ: the lines that state them, and those that ask for them."""
    parts = []
    for key, value in zip(rng.sample(KEYS, count), rng.sample(range(10**DIGITS), count), strict=True):
        digits = f"{value:0{DIGITS}d}"
        for line in (statement(key, digits), query(key, digits)):
            head, tail = line.split(digits)
            parts += [head, digits, tail]
    ids = tokenizer(parts, add_special_tokens=False)["input_ids"] if parts else []
    lines = list(zip(ids[0::3], ids[1::3], ids[2::3], strict=True))
    return lines[0::2], lines[1::2]


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    from ropex.eval.models import default_bos

    return default_bos(tokenizer)
