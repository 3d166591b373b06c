"""vt: a chain of variables through a text, after a worked example."""

import random

from ropex.eval.ruler.draft import Draft, Request
from ropex.eval.ruler.wording import Wording

TOKENS_TO_GENERATE = 30
_HOPS = 4
_STEP = 5  # lines that the worked example grows by


def bounds(request: Request) -> tuple[int, int]:
    """Noise lines: one more than the chain has assignments, at least."""
    return _HOPS + 2, max(_HOPS + 2, request.length)


def grid(length: int) -> tuple[int, int]:
    return 0, 10


def draft(units: int, request: Request) -> Draft:
    """One chain of variables over four hops, strewn in order over `units` noise lines, after an example."""
    wording = request.wording
    example = request.keep("example", lambda: _example(request))
    rng = request.rng()
    names = _names(rng, 5)
    value = next(v for v in iter(lambda: str(rng.randint(10000, 99998)), None) if v not in example)
    head, tail = wording.vt_template.split("{context}")
    lines = wording.vt_join.join(_context(request.rng("order"), wording, units, names, value))
    return Draft(
        text=example + head + lines + tail.format(query=value),
        prefix=wording.vt_prefix.format(num_v=len(names), query=value).strip() + wording.vt_end,
        references=names,
    )


def _example(request: Request) -> str:
    """The worked example: as many noise lines as its room takes, in fives by lm-eval's rules.

    The room, without the answer, is the flavour's, or half of the length where that is less.
    """
    wording = request.wording
    room = min(request.flavour.vt_example_tokens, request.length // 2 - TOKENS_TO_GENERATE)
    lines = least = _HOPS + 2
    question, _ = _solved(request, lines)
    used = request.count(question)
    lines += max(0, room - used) // request.count(wording.vt_noise + wording.vt_join)
    if request.flavour.coarse:
        lines = max(least, lines - lines % 5)
    question, answer = _solved(request, lines)
    return question + answer + wording.vt_gap


def _solved(request: Request, lines: int) -> tuple[str, str]:
    """The worked example with that many noise lines: the question with the answer's prefix, and the answer."""
    wording, rng = request.wording, request.rng("example")
    names, value = _names(rng, 3), str(rng.randint(10000, 99998))
    head, tail = wording.vt_template.split("{context}")
    context = wording.vt_join.join(_context(rng, wording, lines, names, value))
    prefix = wording.vt_prefix.format(num_v=len(names), query=value)
    return head + context + tail.format(query=value) + prefix, f" {' '.join(names)}"


def _names(rng: random.Random, letters: int) -> list[str]:
    """Distinct variable names, one for the first assignment and one for each hop."""
    names: dict[str, None] = {}
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=letters))
        if "VAR" not in name:
            names[name] = None
    return list(names)


def _context(rng: random.Random, wording: Wording, lines: int, names: list[str], value: str) -> list[str]:
    """The noise lines with the chain's assignments between them, in the chain's order."""
    chain = [wording.vt_first.format(names[0], value)]
    chain += [wording.vt_hop.format(new, old) for old, new in zip(names, names[1:], strict=False)]
    sentences = [wording.vt_noise] * lines
    for shift, place in enumerate(sorted(rng.sample(range(lines), len(chain)))):
        sentences.insert(place + shift, chain[shift])
    return sentences
