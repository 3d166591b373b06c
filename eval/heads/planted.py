"""Texts with a needle whose place is known, to see which heads look at it while its value is said."""

import random

from transformers import PreTrainedTokenizerBase

from ropex.eval import grid
from ropex.eval.grid import STYLES, Planted
from ropex.haystack import Haystack

__all__ = ["Planted", "plant"]


def plant(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    depth: float,
    index: int,
    seed: int = 0,
    style: str = "passkey",
) -> Planted:
    """grid.plant as a pure function of these arguments, after the tokenizer's BOS where it has one."""
    rng = random.Random(f"heads {seed} {length} {depth} {index}")
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return grid.plant(tokenizer, haystack, length, depth, rng, STYLES[style], bos)
