"""Token ids of a text that is given in pieces, without tokenising again what was seen before.

A piece's ids depend on its neighbours, and on no more than these: `ids(abc) = ids(a) + rest(a, b) + rest(b, c)`, where
rest(a, b) is what ids(ab) has after ids(a). Where the tokenizer cuts a text into words first, that is so at every cut;
white space at a piece's end may be cut otherwise before another piece, so its last ids may change. Byte-pair merges are
made in the order of their ranks, so one that joins two pieces, if there is one, shows in these two alone: where all the
pairs come apart, the text does. Two neighbours that do not come apart make the whole text be tokenised.
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
_PROBE = "One of the words. Two\nThree 12345"


class Blocks:
    """Counts and ids for one tokenizer. Remembers the pieces and the neighbours that it has seen."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._fast = _backend(tokenizer)
        cuts = self._fast is not None and _cuts(self._fast)
        self._apart = cuts or (self._fast is not None and type(self._fast.model).__name__ == "BPE")
        self._changed = _CHANGED if cuts else 0
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
            changed = next(
                (n for n in range(self._changed + 1) if ids[: len(alone) - n] == alone[: len(alone) - n]), None
            )
            ok = changed is not None and changed < len(alone)
            self._rest[a, b] = (changed, ids[len(alone) - changed :]) if ok and changed is not None else None


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer's core in Rust if there is one that gives the same ids."""
    core: Any = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
    same = core is not None and core.encode(_PROBE, add_special_tokens=False).ids == encode(tokenizer, _PROBE)
    return core if same else None


def _cuts(core: Any) -> bool:
    """Whether a text is cut into words before anything else."""
    return core.pre_tokenizer is not None and len(core.pre_tokenizer.pre_tokenize_str(_PROBE)) > 1
