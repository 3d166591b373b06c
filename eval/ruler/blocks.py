"""Token ids of a text that is given in pieces, without tokenising again what was seen before.

The ids of a piece depend on what stands before it. Where the tokenizer cuts a text before it merges (its
pre-tokenizer), the piece just before is enough: `ids(abc) = ids(a) + rest(a, b) + rest(b, c)`, where rest(a, b) is what
ids(ab) has after ids(a), white space at the end of a aside. Two neighbours whose ids do not come apart in this way make
the whole text be tokenised.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from ropex.eval.models import encode

_KEPT = 2**22  # ids, and a tenth of it of pieces: the tables start again when they are full
_WORTH = 0.5  # share of a text that neighbours never met may make up: beyond it the whole text is the shorter way
_CALL = 32  # characters: what tokenising one more string costs beside its own
_CHANGED = 2  # last ids of a piece that the next piece may change
_ANCHOR = "\n"


class Blocks:
    """Counts and ids for one tokenizer. Remembers the pieces and the neighbours that it has seen."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._fast: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._apart = self._fast is not None and self._fast.pre_tokenizer is not None
        self._counts: dict[str, int] = {}
        self._alone: dict[str, list[int]] = {}
        self._rest: dict[tuple[str, str], tuple[int, list[int]] | None] = {}
        self._met: set[tuple[str, str]] = set()  # neighbours of texts that were not worth learning then
        self._size = 0  # ids in the tables
        self._anchor = len(encode(tokenizer, _ANCHOR))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text alone: no BOS, no EOS, no truncation. On as many cores as the tokenizer takes."""
        if self._fast is None:
            return [encode(self.tokenizer, text) for text in texts]
        self._fast.no_truncation()
        self._fast.no_padding()
        return [e.ids for e in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    def count(self, pieces: Sequence[str]) -> int:
        """Tokens of the pieces, each counted on its own, after a line break: some tokenizers treat the start apart."""
        if len(self._counts) > _KEPT // 10:
            self._counts.clear()
        new = list({piece for piece in pieces if piece not in self._counts})
        for piece, ids in zip(new, self.encode([_ANCHOR + piece for piece in new]), strict=True):
            self._counts[piece] = max(0, len(ids) - self._anchor)
        return sum(map(self._counts.__getitem__, pieces))

    def join(self, texts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Ids of each text, given in pieces."""
        joined = [self._join([piece for piece in pieces if piece]) for pieces in texts]
        missing = [i for i, ids in enumerate(joined) if ids is None]
        for i, ids in zip(missing, self.encode(["".join(texts[i]) for i in missing]), strict=True):
            joined[i] = ids
        return [ids for ids in joined if ids is not None]

    def _join(self, pieces: list[str]) -> list[int] | None:
        if not self._apart or not pieces:
            return None
        if self._size > _KEPT or len(self._met) > _KEPT // 10:
            self._size = 0
            self._rest.clear()
            self._alone.clear()
            self._met.clear()
        neighbours = list(pairwise(pieces))
        new = [pair for pair in dict.fromkeys(neighbours) if pair not in self._rest]
        never = sum(len(a) + len(b) + _CALL for a, b in new if (a, b) not in self._met)
        if never > _WORTH * sum(map(len, pieces)):
            self._met.update(new)
            return None
        self._learn(pieces[0], new)
        ids = list(self._alone[pieces[0]])
        for a, b in neighbours:
            rest = self._rest[a, b]
            if rest is None:
                return None
            changed, more = rest
            if changed:
                if ids[-changed - 1 :] != self._alone[a][-changed - 1 :]:
                    return None
                del ids[-changed:]
            ids += more
        return ids

    def _learn(self, first: str, pairs: list[tuple[str, str]]) -> None:
        singles = [piece for piece in dict.fromkeys([first, *(a for a, _ in pairs)]) if piece not in self._alone]
        self._alone.update(zip(singles, self.encode(singles), strict=True))
        self._size += sum(len(self._alone[piece]) for piece in singles)
        for (a, b), ids in zip(pairs, self.encode([a + b for a, b in pairs]), strict=True):
            self._size += len(ids)
            alone = self._alone[a]
            changed = next((n for n in range(_CHANGED + 1) if ids[: len(alone) - n] == alone[: len(alone) - n]), None)
            ok = changed is not None and changed < len(alone)
            self._rest[a, b] = (changed, ids[len(alone) - changed :]) if ok and changed is not None else None
