"""Prompts that fill a length and never exceed it: prompt, answer prefix, BOS, chat template and answer."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ropex.errors import OptionError
from ropex.eval.models import default_bos, encode
from ropex.eval.ruler.tasks import Draft, Request, Task

_ANCHOR = "\n"  # pieces are counted after a line break: some tokenizers treat the start of a text apart
_ROUNDS = 6  # the whole prompt is tokenised once a round; a round corrects the one before, two are the rule


@dataclass(frozen=True)
class Sample:
    """One prompt, ready for the model."""

    input_ids: list[int]
    text: str  # what input_ids encode, BOS aside
    references: list[str]
    fill: float  # (prompt tokens + tokens to generate) / length
    facts: dict[str, float]


class Prompter:
    """Renders and counts prompts for one tokenizer. Remembers the token counts of pieces it has seen."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: bool = False) -> None:
        if chat_template and not tokenizer.chat_template:
            raise OptionError("the tokenizer has no chat template: evaluate without one")
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.bos = default_bos(tokenizer)
        self._anchor = len(encode(tokenizer, _ANCHOR))
        self._counts: dict[str, int] = {}

    def count(self, piece: str) -> int:
        """Tokens that the piece adds to a text, tokenised on its own the first time."""
        if piece not in self._counts:
            self._counts[piece] = max(0, len(encode(self.tokenizer, _ANCHOR + piece)) - self._anchor)
        return self._counts[piece]

    def render(self, text: str, prefix: str) -> str:
        """The string before tokenisation: the text and the answer's first words, as a chat if so asked."""
        if not self.chat_template:
            return f"{text} {prefix}"
        messages = [{"role": "user", "content": text}]
        chat = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(chat) + prefix

    def encode(self, rendered: str) -> list[int]:
        """Token ids with exactly one BOS if the tokenizer or the template adds one, and no EOS."""
        ids = encode(self.tokenizer, rendered)
        return ids if ids[: len(self.bos)] == self.bos else [*self.bos, *ids]


def make_sample(task: Task, length: int, prompter: Prompter, seed: int, index: int) -> Sample:
    """The sample of that index: a function of nothing but the arguments.

    Raises OptionError if the length is too short for the task.
    """
    request = Request(task.name, length, seed, index, prompter.count)
    room = length - task.tokens_to_generate
    scale, fixed = 1.0, len(prompter.encode(prompter.render("", "")))
    low, high = task.least_units, task.most_units(length)
    best: tuple[Draft, str, list[int]] | None = None

    def estimate(units: int) -> float:
        draft = task.draft(units, request)
        return fixed + sum(map(prompter.count, draft.pieces)) + prompter.count(" " + draft.prefix)

    for _ in range(_ROUNDS):
        if low > high or (best and scale * estimate(low) > room):
            break
        units = _largest(lambda n: scale * estimate(n) <= room, low, high)  # noqa: B023
        draft = task.draft(units, request)
        text = prompter.render("".join(draft.pieces), draft.prefix)
        ids = prompter.encode(text)
        if len(ids) <= room:
            best, low = (draft, text, ids), units + 1
            if len(ids) >= 0.99 * room:
                break
        else:
            high = units - 1
        scale = len(ids) / estimate(units)
    if best is None:
        raise _too_short(task, length, prompter, seed)
    draft, text, ids = best
    return Sample(ids, text, draft.references, (len(ids) + task.tokens_to_generate) / length, draft.facts)


def require_room(task: Task, length: int, prompter: Prompter, seed: int) -> None:
    """Raise OptionError, at once, if the task's shortest prompt does not fit the length."""
    if shortest_length(task, length, prompter, seed) > length:
        raise _too_short(task, length, prompter, seed)


def shortest_length(task: Task, length: int, prompter: Prompter, seed: int) -> int:
    """Tokens that the task's shortest prompt for that length takes, with those to generate."""
    draft = task.draft(task.least_units, Request(task.name, length, seed, 0, prompter.count))
    prompt = prompter.encode(prompter.render("".join(draft.pieces), draft.prefix))
    return len(prompt) + task.tokens_to_generate


def _too_short(task: Task, length: int, prompter: Prompter, seed: int) -> OptionError:
    needed = shortest_length(task, length, prompter, seed)
    return OptionError(
        f"RULER's {task.name} does not fit length {length}: its shortest prompt there and its answer take "
        f"{max(needed, length + 1)} tokens with this tokenizer; use a longer length"
    )


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] that fits, found by doubling and halving; `low` if none does."""
    step = 1
    while low + step <= high and fits(low + step):
        step *= 2
    below, above = low + step // 2 if step > 1 else low, min(low + step, high + 1)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below
