"""Token ids of a text that is given in pieces, without tokenising again what was seen before.

`ids(abc) = ids(a) + rest(a, b) + rest(b, c)`, where rest(a, b) is what ids(ab) has after ids(a), holds where the pieces
come apart. Two ways to be sure of it:

- The tokenizer cuts a text into words before all else, and it does so between a and b. White space at the end of a may
  go with b, so that the last ids of a change.
- It merges byte pairs in the order of their ranks. A merge across two pieces, if there is one, then shows in these two
  alone; where no pair of neighbours has one, the text has none.

Where neither holds for some neighbours, the whole text is tokenised.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from ropex.eval.models import encode

_KEPT = 2**21  # ids, and a tenth of it of pieces: the tables start again when they are full
_WORTH = 0.5  # share of a text that neighbours never met may make up: beyond it the whole text is the shorter way
_CALL = 32  # characters: what tokenising one more string costs beside its own
_CHANGED = 2  # last ids of a piece, for white space, that the next piece may change
_PROBE = "One of the words. Two\nThree 12345"


class Blocks:
    """Counts and ids for one tokenizer. Remembers the pieces and the neighbours that it has seen."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._core = _core(tokenizer)
        self._cuts = self._core is not None and _cuts(self._core)
        self._merges = self._core is not None and type(self._core.model).__name__ == "BPE"
        added = self._core.get_added_tokens_decoder().values() if self._core is not None else ()
        self._added = tuple(str(token.content) for token in added)
        self._anchors = {anchor: encode(tokenizer, anchor) for anchor in ("\n", "1")}
        self._alone: dict[str, tuple[list[int], bool]] = {}  # a piece's ids after its anchor, which they leave alone
        self._rest: dict[tuple[str, str], tuple[int, list[int]] | None] = {}
        self._met: set[tuple[str, str]] = set()  # neighbours of texts that were not worth learning then
        self._size = 0  # ids in the tables

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text alone: no BOS, no EOS, no truncation. On as many cores as the tokenizer takes."""
        if self._core is None:
            return [encode(self.tokenizer, text) for text in texts]
        self._core.no_truncation()
        self._core.no_padding()
        return [e.ids for e in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def count(self, pieces: Sequence[str]) -> int:
        """Tokens of the pieces, each counted on its own."""
        if self._size > _KEPT:
            self._forget()
        self._tokenise(pieces)
        return sum(len(self._alone[piece][0]) for piece in pieces)

    def join(self, texts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Ids of each text, given in pieces."""
        joined = [self._join([piece for piece in pieces if piece]) for pieces in texts]
        missing = [i for i, ids in enumerate(joined) if ids is None]
        for i, ids in zip(missing, self.encode(["".join(texts[i]) for i in missing]), strict=True):
            joined[i] = ids
        return [ids for ids in joined if ids is not None]

    def _join(self, pieces: list[str]) -> list[int] | None:
        if not (self._cuts or self._merges) or not pieces:
            return None
        if self._size > _KEPT or len(self._met) > _KEPT // 10:
            self._forget()
        neighbours = list(pairwise(pieces))
        new = [pair for pair in dict.fromkeys(neighbours) if pair not in self._rest]
        never = sum(len(a) + len(b) + _CALL for a, b in new if (a, b) not in self._met)
        if never > _WORTH * sum(map(len, pieces)):
            self._met.update(new)
            return None
        self._learn(new)
        ids, two = self.encode([pieces[0], "".join(pieces[:2])])
        if not self._cuts and two[: len(ids)] != ids:  # a text's start is no anchor
            return None
        for a, b in neighbours:
            rest = self._rest[a, b]
            if rest is None:
                return None
            changed, more = rest
            if changed:
                if ids[-changed - 1 :] != self._alone[a][0][-changed - 1 :]:
                    return None
                del ids[-changed:]
            ids += more
        return ids

    def _learn(self, pairs: list[tuple[str, str]]) -> None:
        self._tokenise([a for a, _ in pairs])
        for (a, b), ids in zip(pairs, self.encode([_anchor(a) + a + b for a, b in pairs]), strict=True):
            self._rest[a, b] = self._come_apart(a, b, ids[len(self._anchors[_anchor(a)]) :])
            self._size += len(ids)

    def _tokenise(self, pieces: Sequence[str]) -> None:
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._alone]
        for piece, ids in zip(new, self.encode([_anchor(piece) + piece for piece in new]), strict=True):
            anchor = self._anchors[_anchor(piece)]
            self._alone[piece] = ids[len(anchor) :], ids[: len(anchor)] == anchor
            self._size += len(ids)

    def _forget(self) -> None:
        self._size = 0
        self._alone.clear()
        self._rest.clear()
        self._met.clear()

    def _come_apart(self, a: str, b: str, ids: list[int]) -> tuple[int, list[int]] | None:
        """How many of the last ids of a change before b, and the ids that come then; None if a and b join."""
        alone, apart = self._alone[a]
        cut = self._cuts and self._cut_between(a, b)
        inside = a[-1].isalnum() and b[0].isalnum()  # of a word, which some tokenizers look up as a whole
        if not apart or not b.strip() or not (cut or (self._merges and not inside)):
            return None  # white space is cut by what comes after it
        most = min(_CHANGED, len(alone) - 1) if cut else 0
        for changed in range(most + 1):
            kept = len(alone) - changed
            if ids[:kept] == alone[:kept]:
                return changed, ids[kept:]
        return None

    def _cut_between(self, a: str, b: str) -> bool:
        """Whether the text is cut after the last of a that is no white space, or later, but not after a."""
        if b.startswith(self._added):
            return True
        content = len(a.rstrip())
        starts = {start for _, (start, _) in self._core.pre_tokenizer.pre_tokenize_str(a + b)}
        return content > 0 and any(at in starts for at in range(content, len(a) + 1))


def _anchor(piece: str) -> str:
    """What a piece is tokenised after, so that its start is not that of a text: nothing that it would join."""
    return "1" if piece[:1].isspace() else "\n"


def _core(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer's core in Rust if there is one that gives the same ids."""
    core: Any = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
    same = core is not None and core.encode(_PROBE, add_special_tokens=False).ids == encode(tokenizer, _PROBE)
    return core if same else None


def _cuts(core: Any) -> bool:
    """Whether a text is cut into words before anything else."""
    return core.pre_tokenizer is not None and len(core.pre_tokenizer.pre_tokenize_str(_PROBE)) > 1
