"""qa_1 and qa_2: a question after documents, of which some hold its answer."""

import itertools
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Literal

from ropex.eval.ruler.draft import Draft, Request, Task, drawn
from ropex.eval.ruler.sources import Library, Question

TOKENS_TO_GENERATE = 32
_TOKEN = 64  # characters: more than a token has on average
_TRIED = 256  # documents in a row that find no room, before the search for some that do ends
_SPARE = 0.08  # of the room: with less of it free no document is put in twice


def qa_task(name: str, source: Literal["squad", "hotpot"]) -> Task:
    """The task over that source.

    Units are characters of documents, of which as many whole ones are taken as fit; where haystacks grow in steps, they
    are documents. A question keeps those that it comes with.
    """
    return Task(
        name, TOKENS_TO_GENERATE, partial(_draft, source), partial(_bounds, source), _grid, metric="part", needs=source
    )


def _ask(source: str, request: Request) -> tuple[Library, Question]:
    """The sample's question: in the order of the file, from its start again past its end."""
    library: Library = getattr(request.sources, source)
    return library, library.questions[request.index % len(library.questions)]


def _bounds(source: str, request: Request) -> tuple[int, int]:
    library, question = _ask(source, request)
    if request.flavour.coarse:
        return len(question.context), max(len(question.context), len(library.documents))
    least = sum(_size(library, i, request) for i in question.context)
    return least, max(least, _TOKEN * request.length)


def _grid(length: int) -> tuple[int, int]:
    return 0, 10


def _draft(source: str, units: int, request: Request) -> Draft:
    """Documents in an order of the sample's own: the question's, those about the same, then any others."""
    library, question = _ask(source, request)
    known, more = request.keep("documents", lambda: (list(question.context), _further(library, question, request)))
    if request.flavour.coarse:
        known += islice(more, max(0, units - len(known)))
        chosen = known[:units]
    else:
        chosen = _fitting(units, len(question.context), known, more, library, request)
    order = _shuffled(chosen, request, "order")
    wording = request.wording
    texts = (
        wording.qa_document.replace("{i}", str(number), 1).replace("{document}", library.documents[document], 1)
        for number, document in enumerate(order, 1)
    )
    return Draft(
        text=wording.qa_template.format(context="\n\n".join(texts), query=question.query),
        prefix=wording.qa_prefix.strip(),
        references=list(dict.fromkeys(answer for answer in question.answers if answer)),
        facts={"depth": min(order.index(document) for document in question.gold) / max(1, len(order) - 1)},
    )


def _size(library: Library, document: int, request: Request) -> int:
    """Characters of a document with what stands around it."""
    return len(library.documents[document]) + len(request.wording.qa_document)


def _fitting(
    characters: int, first: int, known: list[int], more: Iterator[int], library: Library, request: Request
) -> list[int]:
    """The first documents, and of those after them each that still has room: whole ones leave little of it free.

    known: those read so far of an order without end, whose next ones `more` has.
    """
    chosen = known[:first]
    room = characters - sum(_size(library, i, request) for i in chosen)
    missed, placed, count = 0, first, len(library.documents)
    for place in itertools.count(first):
        if place % count == 0 and place > 0:  # all have had their turn
            if not placed or room <= _SPARE * characters:
                break
            placed = 0
        if place == len(known):
            known.append(next(more))
        size = _size(library, known[place], request)
        if size <= room:
            chosen.append(known[place])
            room -= size
            missed, placed = 0, placed + 1
        else:
            missed += 1
        if missed == _TRIED:
            break
    return chosen


def _further(library: Library, question: Question, request: Request) -> Iterator[int]:
    """Without end, the documents that come after the question's own."""
    near = _shuffled(question.more, request, "more")
    known = {*question.context, *near}
    count = len(library.documents)
    others = (i for i in drawn(count, request.rng("others")) if i not in known)
    again = (i for times in itertools.count() for i in drawn(count, request.rng(f"again {times}")))
    return chain(near, others, again)


def _shuffled(numbers: list[int], request: Request, purpose: str) -> list[int]:
    mixed = list(numbers)
    request.rng(purpose).shuffle(mixed)
    return mixed
