"""cwe and fwe: the most frequent words of a list."""

import math
from functools import cache
from itertools import islice

from ropex.eval.ruler.draft import Draft, Request, drawn
from ropex.eval.ruler.wording import load_words

_SHORT = 4096  # tokens; below it RULER repeats the words of cwe less often
_COMMON = 10
_RANKS_TOLD_APART = 53  # from so many draws on, fwe's ranks 2 to 4 each occur more often than the next rank


def cwe_bounds(request: Request) -> tuple[int, int]:
    """Words: one that is not common, at least."""
    return _COMMON + 1, max(_COMMON + 1, request.length) if request.flavour.repeats else len(cwe_words())


def cwe_grid(length: int) -> tuple[int, int]:
    return 0, 10


def cwe(units: int, request: Request) -> Draft:
    """A numbered list of `units` different words, ten of them much more frequent, after a worked example.

    30 and 3 times (worked example: 40 words, 10 and 3 times); below 4,096 tokens 6 and once (20 words, 3 and once).
    Past the word list's end, words are pairs of an adjective and a noun.
    """
    wording = request.wording
    short = request.length < _SHORT
    often, seldom = (6, 1) if short else (30, 3)
    head, tail = wording.cwe_template.split("{context}")
    words, more = request.keep("words", lambda: ([], drawn(len(cwe_words()), request.rng())))
    words += (cwe_words()[i] for i in islice(more, max(0, units - len(words))))
    if units > len(words):
        words += _pairs(request, units - len(words), set(words))
    chosen = words[:units]
    entries = _entries(request, "order", chosen, often, seldom)
    example = (
        request.keep("example", lambda: _example(request, head, tail, short)) if request.flavour.cwe_example else ""
    )
    return Draft(
        text=example + head + entries + tail,
        prefix=wording.cwe_prefix.strip(),
        references=chosen[:_COMMON],
        delimiter=wording.cwe_delimiter,
    )


def _example(request: Request, head: str, tail: str, short: bool) -> str:
    units, often, seldom = (20, 3, 1) if short else (40, 10, 3)
    wording = request.wording
    solved = request.rng("example").sample(cwe_words(), units)
    listed = _entries(request, "example order", solved, often, seldom)
    answer = " ".join(wording.cwe_entry.format(i, word) for i, word in enumerate(solved[:_COMMON], 1))
    return f"{head}{listed}{tail}{wording.cwe_prefix}{wording.cwe_gap}{answer}\n"


@cache
def cwe_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, sorted, each once."""
    return tuple(sorted({word for words in load_words().values() for word in words}))


def _pairs(request: Request, count: int, taken: set[str]) -> list[str]:
    """Words for lists longer than there are words."""
    rng, words = request.rng(f"pairs {len(taken)}"), load_words()
    found: dict[str, None] = {}
    while len(found) < count:
        pair = f"{rng.choice(words['adjective'])}-{rng.choice(words['noun'])}"
        if pair not in taken:
            found[pair] = None
    return list(found)


def _entries(request: Request, purpose: str, words: list[str], often: int, seldom: int) -> str:
    """The numbered list."""
    listed = words[:_COMMON] * often + words[_COMMON:] * seldom
    request.rng(purpose).shuffle(listed)
    entry = request.wording.cwe_entry
    return " ".join(entry.format(number, word) for number, word in enumerate(listed, 1))


def fwe_bounds(request: Request) -> tuple[int, int]:
    """Draws. The dots are one token, and every second draw or so gives one."""
    return _RANKS_TOLD_APART, max(_RANKS_TOLD_APART, 2 * request.length)


def fwe_grid(length: int) -> tuple[int, int]:
    return length // 6, max(1, length // 32)


def fwe(units: int, request: Request) -> Draft:
    """`units` draws of coded words whose counts fall with the square of their rank; rank 1 is a row of dots.

    The answers are ranks 2 to 4. The vocabulary has (L - 50) // 50 words of six letters, or lm-eval's L // 50.
    """
    coded = request.keep("coded", lambda: _coded(request, fwe_vocabulary(request)))
    words = ["...", *coded]
    zeta_2 = math.pi**2 / 6
    listed: list[str] = []
    for rank, word in enumerate(words, 1):
        count = int(units / (rank**2 * zeta_2))
        if not count:
            break
        listed += [word] * count
    request.rng("order").shuffle(listed)
    wording = request.wording
    return Draft(
        text=wording.fwe_template.replace("{context}", " ".join(listed)),
        prefix=wording.fwe_prefix.strip(),
        references=words[1:4],
    )


def _coded(request: Request, size: int) -> list[str]:
    rng, coded = request.rng(), dict[str, None]()
    while len(coded) < size - 1:
        coded["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))] = None
    return list(coded)


def fwe_vocabulary(request: Request) -> int:
    """Coded words at that length, the dots among them; four at least, or there is nothing to ask for."""
    return max(4, (request.length - request.flavour.fwe_reserve) // 50)
