"""How many prompts at a time."""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from ropex.errors import OptionError
from ropex.eval.models import load_model, method_of, weights_fingerprint
from ropex.eval.ruler.generate import Answer, Ask, greedy_answers

_ROWS = {"cuda": (32, 2**19), "cpu": (8, 2**15)}  # of a batch at most, and its tokens at most


class NoRoomError(OptionError):
    """Not even one prompt of that length can be answered."""


class Backend(Protocol):
    """What answers for one checkpoint: its method, dtype and weights' fingerprint, and what there is to tell."""

    method: str
    dtype: str
    weights: str
    notes: list[str]

    def rows(self, length: int) -> int:
        """Prompts that `answers` is given at a time."""

    def answers(self, asks: Sequence[Ask], length: int, tokens_to_generate: int) -> list[Answer]:
        """Of prompts for that length."""


class Batches:
    """Answers by transformers in batches as large as memory takes, found by halving them where it runs out."""

    def __init__(
        self, checkpoint: str, dtype: str | torch.dtype | None, tokenizer: PreTrainedTokenizerBase, size: int | None
    ) -> None:
        self.model, self.tokenizer, self.size = load_model(checkpoint, dtype), tokenizer, size
        self.method, self.dtype = method_of(self.model), str(self.model.dtype)
        self.weights = weights_fingerprint(self.model)
        self.notes: list[str] = []
        self._least: dict[int, int] = {}  # rows that did fit, by length, once memory ran out

    def rows(self, length: int) -> int:
        """Of a batch: as asked for, or as many as a fixed number of tokens has room for."""
        rows, tokens = _ROWS[self.model.device.type if self.model.device.type in _ROWS else "cpu"]
        return self.size or max(1, min(rows, tokens // length))

    def answers(self, asks: Sequence[Ask], length: int, tokens_to_generate: int) -> list[Answer]:
        """Of prompts for that length. Raises NoRoomError where even a batch of one is too large."""
        answers: list[Answer] = []
        while len(answers) < len(asks):
            rows = self._least.get(length, len(asks))
            part = asks[len(answers) : len(answers) + rows]
            got = self._try(part, tokens_to_generate)
            if got is None:
                self._halve(length, len(part))
            else:
                answers += got
        return answers

    def _try(self, asks: Sequence[Ask], tokens_to_generate: int) -> list[Answer] | None:
        """None where memory ran out; what was held is let go before the next try."""
        try:
            return greedy_answers(self.model, self.tokenizer, asks, tokens_to_generate)
        except torch.OutOfMemoryError:
            return None

    def _halve(self, length: int, rows: int) -> None:
        if rows == 1:
            raise NoRoomError(f"memory ran out at a prompt of {length} tokens: use shorter lengths, or a 16-bit dtype")
        self._least[length] = rows // 2
        self.notes.append(f"memory ran out at {length} with batches of {rows}, so they have {rows // 2} there.")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
