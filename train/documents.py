"""Training text: from files, folders and Hub datasets to one array of tokens."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ropex.errors import DataError
from ropex.train.windows import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = (".txt", ".md")
TABLES = (".jsonl", ".parquet")
_BATCH_CHARACTERS = 4_000_000  # texts go to the tokenizer together, which then uses every core


def sources(data: Iterable[str]) -> list[str | Path]:
    """Files (folders opened up) and Hub ids, in the order given; what is neither is an error."""
    found: list[str | Path] = []
    for item in data:
        path = Path(item).expanduser()
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix in TEXT + TABLES and p.is_file())
            if not files:
                raise DataError(f"{item} holds no {', '.join(TEXT + TABLES)} file: give a folder of texts")
            found += files
        elif path.is_file():
            if path.suffix not in TEXT + TABLES:
                raise DataError(f"{item}: '{path.suffix}' is not read: give one of {', '.join(TEXT + TABLES)}")
            found.append(path)
        elif path.suffix in TEXT + TABLES or item.startswith((".", "/", "~")) or item.count("/") != 1:
            raise DataError(f"{item} does not exist: give a file, a folder or a Hub dataset (owner/name)")
        else:
            found.append(item)
    if not found:
        raise DataError("no training text: give --data a file, a folder or a Hub dataset (owner/name)")
    return found


def read(source: str | Path) -> Iterator[str]:
    """The documents of one source: a text file is one, a .jsonl line or table row with `text` is one."""
    if isinstance(source, str):
        yield from _hub(source)
    elif source.suffix == ".jsonl":
        yield from _json_lines(source)
    elif source.suffix == ".parquet":
        yield from _parquet(source)
    else:
        yield _decoded(source)


def _decoded(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): convert it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _json_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise DataError(f'{path}, line {number}: not an object with a "text" string')
                yield text
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text: convert it") from None


def _parquet(path: Path) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            if "text" not in table.schema_arrow.names:
                raise DataError(f"{path} has no column 'text' (it has: {', '.join(table.schema_arrow.names)})")
            for batch in table.iter_batches(columns=["text"]):
                yield from _texts(batch.column(0).to_pylist(), str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _hub(name: str) -> Iterator[str]:
    """A Hub dataset's `train` split, or the one after the colon: owner/name:split."""
    from datasets import load_dataset

    repository, _, split = name.partition(":")
    try:
        rows = load_dataset(repository, split=split or "train")
    except Exception as error:  # the Hub, the network and each dataset's loader raise their own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name} is no file here and does not load as a Hub dataset ({reason})") from None
    if "text" not in rows.column_names:
        raise DataError(f"{name} has no column 'text' (it has: {', '.join(rows.column_names)})")
    for batch in rows.select_columns(["text"]).iter(batch_size=256):
        yield from _texts(batch["text"], name)


def _texts(values: Iterable[object], where: str) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise DataError(f"{where}: the column 'text' holds {value!r:.40}, not text")
        yield value


def tokenise(
    data: Iterable[str],
    tokenizer: "PreTrainedTokenizerBase",
    window: int,
    vocabulary: int,
    watch: Callable[[int], None] = lambda tokens: None,
) -> Corpus:
    """Tokenise every document by itself (with the special tokens that the tokenizer adds), keep those of `window`
    tokens and more. watch is called with the number of tokens kept so far."""
    kept: list[np.ndarray] = []
    left_out, longest, total, digest = 0, 0, 0, hashlib.sha256()
    for texts in _batches(text for source in sources(data) for text in read(source)):
        for ids in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
            longest = max(longest, len(ids))
            if len(ids) < window:
                left_out += 1
                continue
            tokens = np.asarray(ids, dtype=np.uint32)
            if tokens.max() >= vocabulary:
                raise DataError(
                    f"the tokenizer gives token {tokens.max()}, and the model knows {vocabulary}: "
                    "they are not of one checkpoint"
                )
            digest.update(len(tokens).to_bytes(8, "little"))
            digest.update(tokens.astype("<u4").data)
            kept.append(tokens)
            total += len(tokens)
        watch(total)
    if not kept:
        said = f"the longest has {longest}" if left_out else "there is no document"
        raise DataError(f"no document has the {window} tokens of a window ({said}): give longer texts or --window")
    ends = np.cumsum([len(tokens) for tokens in kept], dtype=np.int64)
    return Corpus(np.concatenate(kept), ends, left_out, longest, digest.hexdigest())


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
