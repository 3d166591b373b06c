"""Training text: from files, folders and Hub datasets to one array of tokens, built once and mapped from the disk."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from ropex.errors import DataError
from ropex.text import hub_fingerprint, read, sources
from ropex.train.windows import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_META = "meta.json"
_BATCH_CHARACTERS = 4_000_000  # texts go to the tokenizer together, which then uses every core


def tokenise(
    data: Iterable[str],
    tokenizer: "PreTrainedTokenizerBase",
    window: int,
    vocabulary: int,
    pack: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """Every document tokenised by itself, with the special tokens that the tokenizer adds: those of `window` tokens and
    more, or to pack those of 2 and more.

    The tokens lie in a cache folder (token_cache), once for each tokenizer and content, and are mapped from there.
    """
    opened = sources(data)
    folder = token_cache() / _key(opened, tokenizer)
    if (folder / _META).exists():
        say(f"tokens taken from {folder}")
    else:
        _build(folder, (document.text for source in opened for document in read(source)), tokenizer)
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    ends: np.ndarray = np.load(folder / "ends.npy")
    lengths = np.diff(ends, prepend=0)
    kept = lengths >= (2 if pack else window)
    longest = int(lengths.max(initial=0))
    if not kept.any():
        said = f"the longest has {longest}" if len(ends) else "there is no document"
        raise DataError(f"no document has the {window} tokens of a window ({said}): give longer texts or --window")
    if meta["largest"] >= vocabulary:
        raise DataError(
            f"the tokenizer gives token {meta['largest']}, and the model knows {vocabulary}: they are not of one "
            "checkpoint"
        )
    tokens = np.memmap(folder / "tokens.bin", dtype="<u4", mode="r")
    return Corpus(tokens, (ends - lengths)[kept], ends[kept], int((~kept).sum()), longest, meta["fingerprint"])


def token_cache() -> Path:
    """Where tokens are kept: $ROPEX_CACHE/tokens, by default ~/.cache/ropex/tokens. It may be deleted at any time."""
    return Path(os.environ.get("ROPEX_CACHE") or Path.home() / ".cache" / "ropex").expanduser() / "tokens"


def _key(opened: list[str | Path], tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of the texts' content and of the tokenizer."""
    digest = hashlib.sha256(f"1 {type(tokenizer).__name__} {tokenizer.special_tokens_map}".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    digest.update(vocabulary.encode())
    for source in opened:
        if isinstance(source, str):
            digest.update(f"hub {hub_fingerprint(source)}".encode())
            continue
        digest.update(f"file {source.suffix} {source.stat().st_size} ".encode())
        with source.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:32]


def _build(folder: Path, texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write tokens.bin, ends.npy and, last, the facts; the folder appears when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    ends, largest, digest = [0], 0, hashlib.sha256()
    with TemporaryDirectory(dir=folder.parent, prefix=".building-") as name:
        building = Path(name) / "whole"
        building.mkdir()
        with (building / "tokens.bin").open("wb") as file:
            for batch in _batches(texts):
                for ids in tokenizer(batch, return_attention_mask=False, verbose=False)["input_ids"]:
                    tokens = np.asarray(ids, dtype="<u4")
                    digest.update(len(tokens).to_bytes(8, "little"))
                    digest.update(tokens.data)
                    file.write(tokens.data)
                    largest = max(largest, int(tokens.max(initial=0)))
                    ends.append(ends[-1] + len(tokens))
        np.save(building / "ends.npy", np.array(ends[1:], dtype=np.int64))
        facts = {"fingerprint": digest.hexdigest(), "largest": largest}
        (building / _META).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        try:
            building.rename(folder)
        except OSError:  # another process was faster
            if not (folder / _META).exists():
                raise


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
