"""Prompts that fill a length and never exceed it: prompt, answer prefix, BOS, chat template and answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ropex.errors import OptionError, first_line
from ropex.eval.models import default_bos
from ropex.eval.ruler.blocks import Blocks
from ropex.eval.ruler.draft import Draft, Request, Task, too_short
from ropex.eval.ruler.flavours import FLAVOURS, Flavour
from ropex.eval.ruler.sources import Sources

_ROUNDS = 6  # the whole prompt is tokenised once a round; a round corrects the one before, two are the rule
_FULL = 0.985  # of the room: a prompt that fills as much is not made longer
_NEAR = 1 / 256  # of the room: how close to it the search by counts has to come
_SURELY = 1.1  # times the tokens counted: a prompt is not longer than that
_SECANTS = 8  # probes before the search halves instead


@dataclass(frozen=True)
class Sample:
    """One prompt, ready for the model."""

    index: int
    input_ids: list[int]
    text: str  # what input_ids encode, BOS aside
    references: list[str]
    fill: float  # (prompt tokens + tokens to generate) / length
    facts: dict[str, float]


class Prompter:
    """Renders, counts and tokenises prompts for one tokenizer, by one set of rules."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: bool = False,
        flavour: Flavour = FLAVOURS["nvidia"],
        sources: Sources | None = None,
    ) -> None:
        if chat_template and not tokenizer.chat_template:
            raise OptionError("the tokenizer has no chat template: evaluate without one")
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.flavour = flavour
        self.sources = sources or Sources()
        self.bos = default_bos(tokenizer)
        self.blocks = Blocks(tokenizer)

    def request(self, task: Task, length: int, seed: int, index: int) -> Request:
        return Request(
            task.name, length, seed, index, lambda piece: self.blocks.count([piece]), self.flavour, self.sources
        )

    def render(self, draft: Draft) -> list[str]:
        """The pieces that are tokenised: the text and the answer's first words, as a chat if so asked."""
        if not self.chat_template:
            return [*draft.pieces, draft.delimiter + draft.prefix]
        text = "".join(draft.pieces)
        messages = [{"role": "user", "content": text}]
        try:
            chat = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
                )
            )
        except Exception as error:  # templates are programs
            raise OptionError(f"the chat template fails ({first_line(error)}): evaluate without it") from None
        before, found, after = chat.partition(text)
        if not found and text.strip() not in chat:
            raise OptionError("the chat template changes or drops the text of a message: evaluate without it")
        return [before, *draft.pieces, after + draft.prefix] if found else [chat + draft.prefix]

    def encode(self, rendered: Sequence[Sequence[str]]) -> list[list[int]]:
        """Token ids with exactly one BOS if the tokenizer or the template adds one, and no EOS."""
        return [
            ids if ids[: len(self.bos)] == self.bos else [*self.bos, *ids] for ids in self.blocks.join(rendered)
        ]  # fmt: skip


def make_samples(task: Task, length: int, prompter: Prompter, seed: int, indices: Sequence[int]) -> list[Sample]:
    """The samples of these indices, each a function of the other arguments and its own index alone.

    Raises OptionError if the length is too short for the task.
    """
    fits = [_Fit(task, length, prompter, seed, index) for index in indices]
    for _ in range(_ROUNDS):
        trials = [(fit, pieces) for fit in fits if (pieces := fit.trial()) is not None]
        for (fit, _), ids in zip(trials, prompter.encode([pieces for _, pieces in trials]), strict=True):
            fit.take(ids)
    return [fit.sample() for fit in fits]


def make_sample(task: Task, length: int, prompter: Prompter, seed: int, index: int) -> Sample:
    """The sample of that index."""
    (sample,) = make_samples(task, length, prompter, seed, [index])
    return sample


class _Fit:
    """The search for the units of one sample: first by the counts of pieces, then by what whole prompts measure."""

    def __init__(self, task: Task, length: int, prompter: Prompter, seed: int, index: int) -> None:
        self.task, self.length, self.prompter = task, length, prompter
        self.request = prompter.request(task, length, seed, index)
        self.room = length - task.tokens_to_generate
        self.low, self.high = task.bounds(self.request)
        self.ratio = 1.0  # of tokens measured to tokens counted
        self.units = 0
        self.best: Sample | None = None
        self.done = False
        self.last: tuple[int, Draft, list[str]] | None = None
        self.counts: dict[int, int] = {}

    def draft(self, units: int) -> tuple[Draft, list[str]]:
        """The draft and its pieces; the last ones are kept."""
        if self.last is None or self.last[0] != units:
            draft = self.task.draft(units, self.request)
            self.last = (units, draft, self.prompter.render(draft))
        return self.last[1:]

    def counted(self, units: int) -> float:
        if units not in self.counts:
            self.counts[units] = len(self.prompter.bos) + self.prompter.blocks.count(self.draft(units)[1])
        return self.ratio * self.counts[units]

    def trial(self) -> list[str] | None:
        """The pieces of the next prompt to measure; None where the search is over."""
        if self.done or self.low > self.high or (self.best and self.counted(self.low) > self.room):
            self.done = True
            return None
        most = _largest(self.counted, self.room, self.low, self.high)
        self.units = max(self.low, self.task.on_grid(most, self.request))
        return self.draft(self.units)[1]

    def take(self, ids: list[int]) -> None:
        """What that prompt's tokens are."""
        if len(ids) <= self.room:
            draft, pieces = self.draft(self.units)
            fill = (len(ids) + self.task.tokens_to_generate) / self.length
            self.best = Sample(self.request.index, ids, "".join(pieces), draft.references, fill, draft.facts)
            self.done = self.request.flavour.coarse or len(ids) >= _FULL * self.room
            self.low = self.units + 1
        else:
            self.high = self.units - 1
        self.ratio *= len(ids) / self.counted(self.units)

    def sample(self) -> Sample:
        if self.best is None:
            raise too_short(self.task.name, self.length, shortest_length(self.task, self.request, self.prompter))
        return self.best


def require_room(task: Task, length: int, prompter: Prompter, seed: int, samples: int = 1) -> None:
    """Raise OptionError, at once, if the task's shortest prompt does not fit the length.

    Questions come with documents of their own, so each sample of those tasks is looked at.
    """
    for index in range(samples if task.metric == "part" else 1):
        request = prompter.request(task, length, seed, index)
        pieces = _shortest(task, request, prompter)
        if _SURELY * (prompter.blocks.count(pieces) + len(prompter.bos)) + task.tokens_to_generate <= length:
            continue
        needed = shortest_length(task, request, prompter)
        if needed > length:
            raise too_short(task.name, length, needed)


def shortest_length(task: Task, request: Request, prompter: Prompter) -> int:
    """Tokens that the shortest prompt of that request takes, with those to generate."""
    (ids,) = prompter.encode([_shortest(task, request, prompter)])
    return len(ids) + task.tokens_to_generate


def _shortest(task: Task, request: Request, prompter: Prompter) -> list[str]:
    return prompter.render(task.draft(task.bounds(request)[0], request))


def _largest(size: Callable[[int], float], room: float, low: int, high: int) -> int:
    """The largest n in [low, high] whose size is at most `room`, or one that comes near to it; `low` if none is.

    By secants, since sizes are nearly proportional to n; by halves where these do not get there.
    """
    below, above, at_below = low, high + 1, size(low)
    if at_below >= room:
        return low
    slope = 0.0
    for probe in range(_SECANTS + high.bit_length()):
        if above - below <= 1 or room - at_below < _NEAR * room:
            break
        if probe == 0:
            guess = low + max(32, low)
        elif probe < _SECANTS:
            guess = below + int((room - at_below) / slope)
        else:
            guess = (below + above) // 2
        guess = min(max(guess, below + 1), above - 1)
        at_guess = size(guess)
        if at_guess > at_below:
            slope = (at_guess - at_below) / (guess - below)
        slope = slope or 1.0
        if at_guess <= room:
            below, at_below = guess, at_guess
        else:
            above = guess
    return below
