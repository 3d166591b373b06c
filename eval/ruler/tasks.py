"""Four of RULER's tasks (Hsieh et al. 2024, arXiv:2404.06654) as drafts that can be made longer or shorter.

A task drafts a prompt of any number of units (noise lines or words). A draft depends on nothing but its
units and its `Request`; the sizing in `prompts` picks the units that fill the length.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from ropex.errors import OptionError
from ropex.eval.ruler.wording import Wording, load_wording, load_words

_GOLDEN = (math.sqrt(5) - 1) / 2
_SHORT = 4096  # tokens; below it RULER repeats the words of cwe less often
_HOPS = 4
_EXAMPLE_TOKENS = 500  # room for vt's worked example with its answer
_COMMON_WORDS = 10


@dataclass(frozen=True)
class Request:
    """Which sample is wanted, for which length in tokens; `count` gives the tokens of a piece of text."""

    task: str
    length: int
    seed: int
    index: int
    count: Callable[[str], int]

    def rng(self, purpose: str = "") -> random.Random:
        """A generator of its own for each sample and purpose, the same in every process."""
        return random.Random(f"{self.task} {self.length} {self.seed} {self.index} {purpose}")


@dataclass(frozen=True)
class Draft:
    """A prompt in the making."""

    pieces: list[str]  # joined, they are the text; cut where tokenizers cut, so that their counts add up
    prefix: str  # the first words of the answer, given to the model
    references: list[str]  # the strings that a right answer holds
    facts: dict[str, float] = field(default_factory=dict)  # kept with the sample's result


@dataclass(frozen=True)
class Task:
    """How to draft a task, and within which units."""

    name: str
    tokens_to_generate: int
    draft: Callable[[int, Request], Draft]
    least_units: int
    most_units: Callable[[int], int]  # of the length in tokens; a unit is never less than a token


def get_task(name: str) -> Task:
    """The task of that name. Raises OptionError for an unknown one."""
    if name not in TASKS:
        raise OptionError(f"unknown RULER task {name!r}: choose from {', '.join(TASKS)}")
    return TASKS[name]


def niah_single_1(units: int, request: Request) -> Draft:
    """One needle in `units` equal noise lines: a magic number of seven digits under an adjective-noun key.

    Depths go through the window in golden-ratio steps of the index, so a few samples already cover it.
    """
    wording, words, rng = load_wording(), load_words(), request.rng()
    key = f"{rng.choice(words['adjective'])}-{rng.choice(words['noun'])}"
    value = str(rng.randint(10**6, 10**7 - 1))
    needle = wording.niah_needle.format(type_needle_v="numbers", key=key, value=value)
    depth = (random.Random(request.seed).random() + request.index * _GOLDEN) % 1
    lines = [wording.niah_noise] * units
    lines.insert(int(depth * (units + 1)), needle)
    head, tail = wording.niah_template.split("{context}")
    return Draft(
        pieces=[
            head.format(type_needle_v="number"),
            *(line + "\n" for line in lines[:-1]),
            lines[-1],
            tail.format(type_needle_v="number", query=key),
        ],
        prefix=wording.niah_prefix.format("number", key),
        references=[value],
        facts={"depth": depth},
    )


def vt(units: int, request: Request) -> Draft:
    """One chain of variables over four hops, strewn in order over `units` noise lines, after an example."""
    wording = load_wording()
    example = _vt_example(request, wording)
    rng = request.rng()
    names = _vt_names(rng, 5)
    value = next(v for v in iter(lambda: str(rng.randint(10000, 99998)), None) if v not in example)
    head, tail = wording.vt_template.split("{context}")
    sentences = _vt_context(rng, wording, units, names, value)
    return Draft(
        pieces=[example, head, sentences[0], *(" " + s for s in sentences[1:]), tail.format(query=value)],
        prefix=wording.vt_prefix.format(num_v=len(names), query=value).strip(),
        references=names,
    )


def _vt_example(request: Request, wording: Wording) -> str:
    """The worked example: noise lines in fives, as 500 tokens (or half of the length) have room for."""
    room = min(_EXAMPLE_TOKENS, request.length // 2) - TASKS["vt"].tokens_to_generate
    example = _vt_solved(request, wording, _HOPS + 2)
    for lines in range(10, room, 5):
        longer = _vt_solved(request, wording, lines)
        if request.count(longer) > room:
            break
        example = longer
    return example


def _vt_solved(request: Request, wording: Wording, lines: int) -> str:
    rng = request.rng("example")
    names, value = _vt_names(rng, 3), str(rng.randint(10000, 99998))
    context = " ".join(_vt_context(rng, wording, lines, names, value))
    question = wording.vt_template.format(context=context, query=value)
    prefix = wording.vt_prefix.format(num_v=len(names), query=value).rstrip()
    return f"{question}{prefix} {' '.join(names)}\n\n"


def _vt_names(rng: random.Random, letters: int) -> list[str]:
    """Distinct variable names, one for the first assignment and one for each hop."""
    names: dict[str, None] = {}
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=letters))
        if "VAR" not in name:
            names[name] = None
    return list(names)


def _vt_context(rng: random.Random, wording: Wording, lines: int, names: list[str], value: str) -> list[str]:
    """The noise lines with the chain's assignments between them, in the chain's order."""
    chain = [wording.vt_first.format(names[0], value)]
    chain += [wording.vt_hop.format(new, old) for old, new in zip(names, names[1:], strict=False)]
    sentences = [wording.vt_noise] * lines
    for shift, place in enumerate(sorted(rng.sample(range(lines), len(chain)))):
        sentences.insert(place + shift, chain[shift])
    return sentences


def cwe(units: int, request: Request) -> Draft:
    """A numbered list of `units` different words, ten of them much more frequent, after a worked example.

    30 and 3 times (worked example: 40 words, 10 and 3 times); below 4,096 tokens 6 and once (20 words, 3
    and once).
    """
    wording, rng = load_wording(), request.rng()
    words = list(cwe_words())
    rng.shuffle(words)
    short = request.length < _SHORT
    often, seldom = (6, 1) if short else (30, 3)
    solved_units, solved_often, solved_seldom = (20, 3, 1) if short else (40, 10, 3)
    head, tail = wording.cwe_template.split("{context}")
    prefix = wording.cwe_prefix

    solved = request.rng("example").sample(words, solved_units)
    solved_list = _cwe_entries(request.rng("example order"), solved, solved_often, solved_seldom, wording)
    answer = " ".join(wording.cwe_entry.format(i, word) for i, word in enumerate(solved[:_COMMON_WORDS], 1))
    example = f"{head}{''.join(solved_list)}{tail}{prefix} {answer}\n"
    chosen = words[:units]
    entries = _cwe_entries(request.rng("order"), chosen, often, seldom, wording)
    return Draft([example, head, *entries, tail], prefix.strip(), chosen[:_COMMON_WORDS])


@cache
def cwe_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, sorted, each once."""
    return tuple(sorted({word for words in load_words().values() for word in words}))


def _cwe_entries(rng: random.Random, words: list[str], often: int, seldom: int, wording: Wording) -> list[str]:
    """The list's pieces: number and word of each entry apart, as numbers recur in all samples."""
    drawn = words[:_COMMON_WORDS] * often + words[_COMMON_WORDS:] * seldom
    rng.shuffle(drawn)
    pieces: list[str] = []
    for number, word in enumerate(drawn, 1):
        entry = wording.cwe_entry.format(number, word)
        pieces += [(" " if number > 1 else "") + entry.removesuffix(" " + word), " " + word]
    return pieces


def fwe(units: int, request: Request) -> Draft:
    """`units` draws of coded words whose counts fall with the square of their rank; rank 1 is a row of dots.

    The answers are ranks 2 to 4. The vocabulary has (L - 50) // 50 words of six letters.
    """
    wording, rng = load_wording(), request.rng()
    size = fwe_vocabulary(request.length)
    coded: dict[str, None] = {}
    while len(coded) < size - 1:
        coded["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))] = None
    words = ["...", *coded]
    zeta_2 = math.pi**2 / 6
    drawn: list[str] = []
    for rank, word in enumerate(words, 1):
        count = int(units / (rank**2 * zeta_2))
        if not count:
            break
        drawn += [word] * count
    request.rng("order").shuffle(drawn)
    head, tail = wording.fwe_template.split("{context}")
    head, gap = head.rstrip(" "), head[len(head.rstrip(" ")) :]
    return Draft(
        pieces=[head, gap + drawn[0], *(" " + word for word in drawn[1:]), tail],
        prefix=wording.fwe_prefix.strip(),
        references=words[1:4],
    )


def fwe_vocabulary(length: int) -> int:
    """Coded words at that length, the dots among them. Raises OptionError if fewer than four."""
    size = (length - 50) // 50
    if size < 4:
        raise OptionError(f"RULER's fwe has fewer than 4 coded words at length {length}: use 250 or more")
    return size


# From 53 draws on, ranks 2 to 4 each occur more often than the next rank. vt needs a noise line more than
# its chain has assignments, cwe a word that is not common.
TASKS = {
    task.name: task
    for task in (
        Task("niah_single_1", 128, niah_single_1, 1, lambda length: length),
        Task("vt", 30, vt, _HOPS + 2, lambda length: length),
        Task("cwe", 120, cwe, _COMMON_WORDS + 1, lambda _: len(cwe_words())),
        Task("fwe", 50, fwe, 53, lambda length: 2 * length),
    )
}
