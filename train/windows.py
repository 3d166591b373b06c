"""Training windows: each a pure function of (seed, index), so that a resumed run needs no replay.

A window is a stretch of one document. Where it is shorter than the target, its positions jump (position-skip training):
it is made of pieces of the document that lie apart, so that a short window still shows the distances of the target.
Packed windows hold several documents instead, which do not see each other.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from ropex.errors import DataError
from ropex.train.loss import IGNORED
from ropex.train.recall import with_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEWEST_PIECES, MOST_PIECES = 2, 4
SINK, REPEATED = 4, 5  # tokens


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents, end to end in one array, which may lie on the disk.

    tokens: uint32 [N]. starts, ends: where each document lies in it, int64 [documents]. left_out: documents too short.
    longest: tokens of the longest document, left out or not. fingerprint: of all tokens and borders.
    """

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    left_out: int
    longest: int
    fingerprint: str

    @property
    def documents(self) -> int:
        return len(self.ends)

    @property
    def size(self) -> int:
        """Tokens of all documents that are not left out."""
        return int((self.ends - self.starts).sum())

    def windows(self, window: int) -> np.ndarray:
        """How many windows start in this document or one before it: int64 [documents], ascending."""
        return np.cumsum(self.ends - self.starts - window + 1)


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


def text_places(positions: np.ndarray, offset: int, length: int) -> np.ndarray:
    """Where in a document of `length` tokens those of a window with these positions [window] are, ascending.

    offset: where the window would begin if nothing was skipped, 0 to length - window; it begins as far along what is
    left to choose. Where positions jump, so does the text, by as many tokens: what a query finds at a distance is what
    stands there in a long text. If the text went on across a jump, heads would learn to look thousands of positions
    back for what is beside a token when the model is used. A document too short is jumped over in proportion.
    """
    skipped, room = positions - np.arange(len(positions)), length - len(positions)
    if skipped[-1] > room:
        skipped = skipped * room // skipped[-1]
    return offset * (room - skipped[-1] + 1) // (room + 1) + np.arange(len(positions)) + skipped


def weigh_skipped(positions: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What to add to the attention scores of rows whose positions jump, so that tokens stand for those skipped.

    positions: [B, T], from 0 in ascending pieces; ids: [B, T], their tokens. Returns [B, 1, T, T]: 0 for keys in a
    query's own piece, for those of an earlier piece the logarithm of how many positions each stands for, -inf above the
    diagonal. The weights of a piece add up to the positions from its start to the next one's, so that those of what a
    query at position p sees sum to p + 1: as many keys compete as will when the model is used. Without weights a window
    of 2,048 tokens trains the scale at position 32,767 against 2,048 keys at most, and leaves attention too blunt.

    What a long text has once keeps the weight 1, and the other tokens of its piece share the rest: the first SINK
    tokens, which take attention that no other key gets, and what is said in a later piece again (spans of REPEATED
    tokens), which is what the later piece can retrieve. With many of each, heads learn to find what is there often.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    piece = begins.cumsum(1) - 1
    once = _repeated(ids, piece)
    once[:, :SINK] = True
    shape = len(positions), int(piece.max()) + 2

    def per_piece(values: torch.Tensor) -> torch.Tensor:
        return positions.new_zeros(shape).scatter_add_(1, piece, values)

    starts, others = per_piece(torch.where(begins, positions, 0)), per_piece((~once).long())
    once &= others.gather(1, piece) > 0  # where nothing else is there to stand for the rest, they do
    alone, others = per_piece(once.long())[:, :-1], per_piece((~once).long())[:, :-1]
    weights = (starts[:, 1:] - starts[:, :-1] - alone) / others.clamp(min=1)  # of a row's last piece: never used
    log = weights.clamp(min=1).log().gather(1, piece).masked_fill_(once, 0).to(dtype)
    bias = torch.where(piece[:, :, None] == piece[:, None], 0, log[:, None])
    above = torch.ones(positions.shape[1], positions.shape[1], dtype=torch.bool, device=positions.device).triu(1)
    return bias.masked_fill_(above, -torch.inf)[:, None]


def _repeated(ids: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Which tokens [B, T] are of a span of REPEATED tokens that a later piece has too."""
    found = torch.zeros_like(ids, dtype=torch.bool)
    for row, where, mine in zip(ids.unfold(1, REPEATED, 1), piece, found, strict=True):
        kinds, kind = torch.unique(row, dim=0, return_inverse=True)
        begins = where[: len(kind)]
        last = where.new_zeros(len(kinds)).scatter_reduce_(0, kind, begins, "amax")
        again = last[kind] > begins
        for offset in range(REPEATED):
            mine[offset : offset + len(kind)] |= again
    return found


class Windows(Dataset):
    """`count` windows from number `first` of the endless series that a seed gives; later stages start further on.

    recall: the share of windows with facts in them, in the tokens of `tokenizer`."""

    def __init__(
        self,
        corpus: Corpus,
        window: int,
        target: int,
        seed: int,
        first: int,
        count: int,
        pack: bool = False,
        recall: float = 0,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        self.corpus, self.window, self.target, self.pack = corpus, window, target, pack
        self.seed, self.first, self.count = seed, first, count
        self.recall, self.tokenizer = recall, tokenizer
        if not corpus.documents:
            raise DataError(f"no document has {window} tokens: the longest has {corpus.longest}")
        self._cumulative = np.cumsum(corpus.ends - corpus.starts) if pack else corpus.windows(window)

    def __len__(self) -> int:
        return self.count

    def _pick(self, rng: np.random.Generator) -> tuple[int, int]:
        """A document, and which of its windows (or, to pack, of its tokens): each as likely as any other."""
        pick = int(rng.integers(self._cumulative[-1]))
        document = int(np.searchsorted(self._cumulative, pick, side="right"))
        return document, pick - int(self._cumulative[document - 1] if document else 0)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """input_ids, labels and position_ids, each int64 [window], and unless packed an attention_mask.

        The mask is all ones on purpose: without one, transformers takes a jump in the positions for the border of
        two packed documents and hides the earlier piece from the later. That is what packed windows rely on.
        """
        if index >= self.count:
            raise IndexError(index)
        rng = np.random.default_rng((self.seed, self.first + index))
        if self.pack:
            return self._packed(rng)
        document, offset = self._pick(rng)
        positions = skip_positions(rng, self.window, self.target)
        start, end = int(self.corpus.starts[document]), int(self.corpus.ends[document])

        def read(at: np.ndarray) -> np.ndarray:
            places: np.ndarray = self.corpus.tokens[start + text_places(at, offset, end - start)]
            return places.astype(np.int64)

        if self.recall and self.tokenizer is not None and rng.random() < self.recall:
            ids, positions, told = with_facts(self.tokenizer, read, positions, rng)
            labels = np.where(told, ids, IGNORED)
        else:
            ids = labels = read(positions)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels.copy()),
            "position_ids": torch.from_numpy(positions),
            "attention_mask": torch.ones(self.window, dtype=torch.int64),
        }

    def _packed(self, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Documents one after another, each with positions from 0; one that is longer than the room left gives a
        stretch of itself. Nothing predicts a document's first token."""
        ids, positions, labels, left = [], [], [], self.window
        while left:
            document, _ = self._pick(rng)
            start, end = int(self.corpus.starts[document]), int(self.corpus.ends[document])
            if end - start > left:
                start += int(rng.integers(end - start - left + 1))
                end = start + left
            piece = self.corpus.tokens[start:end].astype(np.int64)
            ids.append(piece)
            positions.append(np.arange(len(piece), dtype=np.int64))
            labels.append(np.concatenate(([IGNORED], piece[1:])))
            left -= len(piece)
        parts = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(np.concatenate(part)) for name, part in parts.items()}
