"""Training windows: each a pure function of (seed, index), so that a resumed run needs no replay.

A window is a stretch of one document. Where it is shorter than the target, its positions jump (position-skip training):
it is cut into pieces whose positions lie apart, so that a short window still shows the distances of the target.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from ropex.errors import DataError

FEWEST_PIECES, MOST_PIECES = 2, 4


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents, each long enough for a window, end to end.

    tokens: uint32 [N]. ends: where each document ends in it, int64 [documents]. left_out: documents too short.
    longest: tokens of the longest document, left out or not. fingerprint: of tokens and ends.
    """

    tokens: np.ndarray
    ends: np.ndarray
    left_out: int
    longest: int
    fingerprint: str

    @property
    def documents(self) -> int:
        return len(self.ends)

    def windows(self, window: int) -> np.ndarray:
        """How many windows start in this document or one before it: int64 [documents], ascending."""
        lengths = np.diff(self.ends, prepend=0)
        return np.cumsum(lengths - window + 1)


def skip_positions(rng: np.random.Generator, window: int, target: int) -> np.ndarray:
    """Positions [window] below target, in 2 to 4 consecutive pieces; a whole window has them from 0 on.

    The first piece starts at 0: then a query's position is how far back it can see, as it will be when the model is
    used, and the length-dependent scale is trained at the lengths that it is for. The jumps add up to a number that is
    uniform over what the target leaves room for, so the last piece lies anywhere.
    """
    positions = np.arange(window, dtype=np.int64)
    room = target - window
    if room <= 0:
        return positions
    pieces = int(rng.integers(FEWEST_PIECES, MOST_PIECES + 1))
    cuts = np.sort(rng.choice(window - 1, pieces - 1, replace=False)) + 1
    jumped = int(rng.integers(room + 1))
    offsets = np.append(np.sort(rng.integers(0, jumped + 1, pieces - 2)), jumped)
    for cut, offset, before in zip(cuts, offsets, np.append(0, offsets), strict=False):
        positions[cut:] += offset - before
    return positions


class Windows(Dataset):
    """`count` windows from number `first` of the endless series that a seed gives; later stages start further on."""

    def __init__(self, corpus: Corpus, window: int, target: int, seed: int, first: int, count: int) -> None:
        self.corpus, self.window, self.target = corpus, window, target
        self.seed, self.first, self.count = seed, first, count
        self._cumulative = corpus.windows(window)
        if not len(self._cumulative):
            raise DataError(f"no document has {window} tokens: the longest has {corpus.longest}")

    def __len__(self) -> int:
        return self.count

    def place(self, rng: np.random.Generator) -> int:
        """First token of a window, every window of every document as likely as any other."""
        pick = int(rng.integers(self._cumulative[-1]))
        document = int(np.searchsorted(self._cumulative, pick, side="right"))
        if document == 0:
            return pick
        return int(self.corpus.ends[document - 1] + pick - self._cumulative[document - 1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """input_ids, labels, position_ids and attention_mask, each int64 [window].

        The mask is all ones on purpose: without one, transformers takes a jump in the positions for the border of
        two packed documents and hides the earlier piece from the later.
        """
        if index >= self.count:
            raise IndexError(index)
        rng = np.random.default_rng((self.seed, self.first + index))
        start = self.place(rng)
        ids = torch.from_numpy(self.corpus.tokens[start : start + self.window].astype(np.int64))
        return {
            "input_ids": ids,
            "labels": ids.clone(),
            "position_ids": torch.from_numpy(skip_positions(rng, self.window, self.target)),
            "attention_mask": torch.ones_like(ids),
        }
