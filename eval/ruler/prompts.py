"""Prompts that fill a length and never exceed it: prompt, answer prefix, BOS, chat template and answer."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ropex.errors import OptionError, first_line
from ropex.eval.models import default_bos, encode, encode_all
from ropex.eval.ruler.draft import Draft, Request, Task, TooShortError
from ropex.eval.ruler.flavours import FLAVOURS, Flavour
from ropex.eval.ruler.sources import Sources

LEAST_FILL = 0.9  # of the length; where whole lines or documents leave more of it empty, it is too short
_GUESSES = 6  # by estimates; the search halves from then on
_FLOORS, _STEP = 6, 1.2  # tries to find a length that is not too short, and how much longer each is
_LOOKED_AT = 2**19  # tokens of the first samples, whose fill is looked at before a run
_FULL = 0.97  # of the room: a prompt that fills as much is not made longer
_AIM = 0.988  # of the room: where estimates are to come out, so that few prompts are too long or too short
_NEAR = 1 / 200  # of the room: how close to it the search by estimates has to come
_KEPT = 2**20  # words whose tokens are remembered
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
        self._starts: dict[tuple[str, int, int], tuple[int, float]] = {}
        self._words: dict[str, int] = {}

    def request(self, task: Task, length: int, seed: int, index: int) -> Request:
        def count(text: str) -> int:
            return len(encode(self.tokenizer, text))

        return Request(task.name, length, seed, index, count, self.flavour, self.sources)

    def render(self, draft: Draft) -> str:
        """What is tokenised: the text and the answer's first words, as a chat if so asked."""
        if not self.chat_template:
            return draft.text + draft.delimiter + draft.prefix
        messages = [{"role": "user", "content": draft.text}]
        try:
            chat = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
                )
            )
        except Exception as error:  # templates are programs
            raise OptionError(f"the chat template fails ({first_line(error)}): evaluate without it") from None
        if draft.text.strip() not in chat:
            raise OptionError("the chat template changes or drops the text of a message: evaluate without it")
        return chat + draft.prefix

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids with exactly one BOS if the tokenizer or the template adds one, and no EOS."""
        return [
            ids if ids[: len(self.bos)] == self.bos else [*self.bos, *ids] for ids in encode_all(self.tokenizer, texts)
        ]

    def size(self, text: str, recurs: bool) -> float:
        """About its tokens: a quarter of its characters, or those of its words, of which each is counted once."""
        if not recurs:
            return len(text) / 4
        words = Counter(text.split(" "))
        if len(self._words) > _KEPT:
            self._words.clear()
        new = [word for word in words if word not in self._words]
        for word, ids in zip(new, encode_all(self.tokenizer, [" " + word for word in new]), strict=True):
            self._words[word] = len(ids)
        return sum(times * self._words[word] for word, times in words.items())

    def start(self, task: Task, length: int, seed: int) -> tuple[int, float]:
        """Where the search for every sample's units begins: those that fill the length in a sample that is not asked
        for, and its tokens to what `size` says. None of it depends on which samples are."""
        key = (task.name, length, seed)
        if key not in self._starts:
            probe = _Fit(task, length, self, seed, -1, (0, 1.0))
            _search([probe], self)
            self._starts[key] = probe.units, probe.ratio
        return self._starts[key]


def make_samples(task: Task, length: int, prompter: Prompter, seed: int, indices: Sequence[int]) -> list[Sample]:
    """The samples of these indices, each a function of the other arguments and its own index alone.

    Raises OptionError if the length is too short for the task.
    """
    start = prompter.start(task, length, seed)
    fits = [_Fit(task, length, prompter, seed, index, start) for index in indices]
    _search(fits, prompter)
    return [fit.sample() for fit in fits]


def make_sample(task: Task, length: int, prompter: Prompter, seed: int, index: int) -> Sample:
    """The sample of that index."""
    (sample,) = make_samples(task, length, prompter, seed, [index])
    return sample


@dataclass(frozen=True)
class _Measured:
    """A prompt that was tokenised."""

    text: str
    size: float
    tokens: int


class _Fit:
    """The search for the units of one sample: by what its size is said to be, and by the tokens that whole prompts are
    found to have."""

    def __init__(
        self, task: Task, length: int, prompter: Prompter, seed: int, index: int, start: tuple[int, float]
    ) -> None:
        self.task, self.length, self.prompter = task, length, prompter
        self.request = prompter.request(task, length, seed, index)
        self.room = length - task.tokens_to_generate
        self.low, self.high = task.bounds(self.request)
        self.units, self.ratio = start  # of tokens to size
        self.best: Sample | None = None
        self.short: _Measured | None = None  # the longest that fits
        self.long: _Measured | None = None  # the shortest that does not
        self.done = False
        self.tries = 0
        self.last: tuple[int, Draft, str] | None = None
        self.sizes: dict[int, float] = {}

    def draft(self, units: int) -> tuple[Draft, str]:
        """The draft and the text that it is rendered to; the last ones are kept."""
        if self.last is None or self.last[0] != units:
            draft = self.task.draft(units, self.request)
            self.last = (units, draft, self.prompter.render(draft))
            self.sizes[units] = self.prompter.size(self.last[2], self.task.recurs)
        return self.last[1:]

    def estimate(self, units: int) -> float:
        """Tokens: between those of the prompts measured, or in proportion to the last one's."""
        if units not in self.sizes:
            self.draft(units)
        size, short, long = self.sizes[units], self.short, self.long
        if short and long and short.size < long.size:
            return short.tokens + (size - short.size) * (long.tokens - short.tokens) / (long.size - short.size)
        return self.ratio * size

    def trial(self) -> str | None:
        """The next prompt to measure; None where the search is over."""
        while not self.done and self.low <= self.high:
            self.tries += 1
            if self.tries <= _GUESSES:
                most = _largest(self.estimate, _AIM * self.room, self.low, self.high, self.units)
            else:
                most = (self.low + self.high) // 2
            self.units = max(self.low, self.task.on_grid(most, self.request))
            _, text = self.draft(self.units)
            if self.short and text == self.short.text:
                self.low = self.task.after(self.units, self.request)
            elif self.long and text == self.long.text:
                self.high = self.units - 1
            else:
                return text
        return None

    def take(self, ids: list[int]) -> None:
        """What that prompt's tokens are."""
        draft, text = self.draft(self.units)
        measured = _Measured(text, self.sizes[self.units], len(ids))
        self.ratio = measured.tokens / measured.size
        if len(ids) > self.room:
            self.long, self.high = measured, self.units - 1
            return
        self.short, self.low = measured, self.task.after(self.units, self.request)
        fill = (len(ids) + self.task.tokens_to_generate) / self.length
        if self.best is None or fill > self.best.fill:
            self.best = Sample(self.request.index, ids, text, draft.references, fill, draft.facts)
        self.done = not self.request.flavour.coarse and len(ids) >= _FULL * self.room

    def sample(self) -> Sample:
        if self.best is None:
            refusal = _refusal(self.task, self.length, self.prompter, self.request.seed, [self.request.index])
            assert refusal  # the shortest was among those tried
            raise refusal
        return self.best


def _search(fits: Sequence[_Fit], prompter: Prompter) -> None:
    while trials := [(fit, text) for fit in fits if (text := fit.trial()) is not None]:
        for (fit, _), ids in zip(trials, prompter.encode([text for _, text in trials]), strict=True):
            fit.take(ids)


def require_room(task: Task, length: int, prompter: Prompter, seed: int, samples: int = 1) -> None:
    """Raise OptionError, at once, if the shortest prompt of a sample does not fit the length, or if units, put in
    whole, leave more than a tenth of it empty. Steps of lm-eval's size may leave more."""
    if refusal := _refusal(task, length, prompter, seed, range(samples)):
        raise refusal


def _refusal(task: Task, length: int, prompter: Prompter, seed: int, indices: Sequence[int]) -> TooShortError | None:
    floor, why = _longer(task, length, prompter, seed, indices)
    if not why:
        return None
    for _ in range(_FLOORS):  # a longer length may be too short too
        longer, more = _longer(task, floor, prompter, seed, indices)
        if not more:
            break
        floor = longer
    cure = (
        f"{floor} tokens are too short as well: use a much longer length, or other data"
        if more
        else f"{floor} tokens will do"
    )
    said = f"RULER's {task.name} does not fit length {length} with this tokenizer: {why}; {cure}"
    return TooShortError(said, floor)


def _longer(task: Task, length: int, prompter: Prompter, seed: int, indices: Sequence[int]) -> tuple[int, str]:
    """If that length is too short, one that may not be, and why; else itself and nothing."""
    requests = [prompter.request(task, length, seed, index) for index in indices]
    needed = _needed(task, prompter, requests[:1])
    if task.metric == "part" or 2 * needed > length:  # else there is room for all: only questions differ by so much
        needed = _needed(task, prompter, requests)
    if needed > length:
        return needed, f"the shortest prompt of one of {len(indices)} takes {needed} tokens, the answer included"
    if prompter.flavour.coarse:
        return length, ""
    looked_at = make_samples(task, length, prompter, seed, indices[: max(1, _LOOKED_AT // length)])
    if min(sample.fill for sample in looked_at) >= LEAST_FILL:
        return length, ""
    return math.ceil(_STEP * length), "whole lines, words or documents leave more than a tenth of it empty"


def _needed(task: Task, prompter: Prompter, requests: Sequence[Request]) -> int:
    """Tokens that the shortest prompts of all requests take at most, with those to generate."""
    return max(map(len, prompter.encode([_shortest(task, request, prompter) for request in requests]))) + (
        task.tokens_to_generate
    )


def _shortest(task: Task, request: Request, prompter: Prompter) -> str:
    return prompter.render(task.draft(task.bounds(request)[0], request))


def _largest(size: Callable[[int], float], room: float, low: int, high: int, guess: int) -> int:
    """The largest n in [low, high] whose size is at most `room`, or one that comes near to it; `low` if none is.

    By secants from `guess` on, since sizes are nearly proportional to n; by halves where these do not get there.
    """
    below, above, at_below = low, high + 1, size(low)
    if at_below >= room:
        return low
    slope = 0.0
    for probe in range(_SECANTS + high.bit_length()):
        if above - below <= 1 or room - at_below < _NEAR * room:
            break
        if probe == 0:
            guess = guess if low < guess <= high else low + max(32, low)
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
