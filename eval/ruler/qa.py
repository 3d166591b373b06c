"""qa_1 and qa_2: a question after documents, of which some hold its answer."""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Literal

from ropex.eval.ruler.draft import Draft, Request, Task
from ropex.eval.ruler.sources import Library, Question

TOKENS_TO_GENERATE = 32


def qa_task(name: str, source: Literal["squad", "hotpot"]) -> Task:
    """The task over that source. Units are documents; a question keeps those that it comes with."""
    return Task(
        name, TOKENS_TO_GENERATE, partial(_draft, source), partial(_bounds, source), _grid, metric="part", needs=source
    )


def _ask(source: str, request: Request) -> tuple[Library, Question]:
    """The sample's question: in the order of the file, from its start again past its end."""
    library: Library = getattr(request.sources, source)
    return library, library.questions[request.index % len(library.questions)]


def _bounds(source: str, request: Request) -> tuple[int, int]:
    library, question = _ask(source, request)
    least, most = len(question.context), len(library.documents)
    return least, max(least, request.length if request.flavour.repeats else most)


def _grid(length: int) -> tuple[int, int]:
    return 0, 10


def _draft(source: str, units: int, request: Request) -> Draft:
    """`units` documents in an order of the sample's own: the question's, those about the same, then any others."""
    library, question = _ask(source, request)
    wording = request.wording
    chosen, more = request.keep("documents", lambda: _start(library, question, request))
    chosen += islice(more, max(0, units - len(chosen)))
    order = _shuffled(chosen[:units], request, "order")
    head, tail = wording.qa_template.split("{context}")
    pieces = [head]
    label, end = wording.qa_document.split("{document}")
    before, after = label.split("{i}")
    for number, document in enumerate(order, 1):
        gap = "\n\n" if number < units else ""
        pieces += [before, str(number), after, library.documents[document] + end + gap]
    depth = min(order.index(document) for document in question.context) / max(1, units - 1)
    return Draft(
        pieces=[*pieces, tail.format(query=question.query)],
        prefix=wording.qa_prefix.strip(),
        references=list(dict.fromkeys(answer for answer in question.answers if answer)),
        facts={"depth": depth},
    )


def _start(library: Library, question: Question, request: Request) -> tuple[list[int], Iterator[int]]:
    """The question's documents, and without end those that come after them."""
    near = _shuffled(question.more, request, "more")
    known = {*question.context, *near}
    count = len(library.documents)
    others = (i for i in _drawn(count, request.rng("others")) if i not in known)
    again = (i for times in itertools.count() for i in _drawn(count, request.rng(f"again {times}")))
    return list(question.context), chain(near, others, again)


def _drawn(count: int, rng: random.Random) -> Iterator[int]:
    """The numbers below `count` in an order drawn as far as it is read (Fisher and Yates's)."""
    moved: dict[int, int] = {}
    for i in range(count):
        j = rng.randrange(i, count)
        yield moved.get(j, j)
        moved[j] = moved.get(i, i)


def _shuffled(numbers: list[int], request: Request, purpose: str) -> list[int]:
    mixed = list(numbers)
    request.rng(purpose).shuffle(mixed)
    return mixed
