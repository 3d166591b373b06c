"""Texts with a needle whose place is known, to see which heads look at it while its value is said."""

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ropex.errors import OptionError
from ropex.eval.grid import STYLES
from ropex.eval.models import encode
from ropex.eval.needle import KEYS, Haystack, stretch, weave


@dataclass(frozen=True)
class Planted:
    """ids [T] that end in a question and its answer. asking: positions of the queries that say the answer's tokens, and
    said, those tokens. needle: positions start <= p < end of the needle."""

    ids: list[int]
    asking: list[int]
    said: list[int]
    needle: tuple[int, int]
    depth: float


def plant(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    depth: float,
    index: int,
    seed: int = 0,
    style: str = "passkey",
) -> Planted:
    """A text of exactly `length` tokens, answer included, with a needle at the line end nearest before `depth`, 0 to 1.

    A pure function of its arguments. The haystack is repeated as needed. Errors: OptionError where there is no room.
    """
    form = STYLES[style]
    rng = random.Random(f"heads {seed} {length} {depth} {index}")
    key, value = rng.choice(KEYS), f"{rng.randrange(10**form.digits):0{form.digits}d}"
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    intro, needle, asked, before = (
        encode(tokenizer, text)
        for text in (
            form.intro,
            form.needle.format(key=key, value=value),
            form.question.format(key=key, value=value),
            form.question.format(key=key, value="").rstrip(" "),
        )
    )
    shared = next((i for i, (a, b) in enumerate(zip(asked, before, strict=False)) if a != b), len(before))
    room = length - len(bos) - len(intro) - len(needle) - len(asked)
    if room < 1:
        raise OptionError(f"{length} tokens leave no room for text around a needle: give {length - room + 1} or more")
    times = -(-room // max(1, len(haystack.ids)))
    ends = [end + i * len(haystack.ids) for i in range(times) for end in haystack.ends]
    body, places = weave(stretch(Haystack(haystack.ids * times, ends), room, rng), [(depth, needle)])
    start = len(bos) + len(intro) + places[0]
    ids = [*bos, *intro, *body, *asked]
    first = len(ids) - len(asked) + shared
    return Planted(
        ids, list(range(first - 1, len(ids) - 1)), asked[shared:], (start, start + len(needle)), depth
    )  # fmt: skip
