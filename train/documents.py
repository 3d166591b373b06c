"""Training text: from files, folders and Hub datasets to one array of tokens, built once and mapped from the disk."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from ropex.errors import DataError
from ropex.train.windows import Corpus

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

TEXT = (".txt", ".md")
TABLES = (".jsonl", ".parquet")
_META = "meta.json"
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
    repository, _, split = name.partition(":")
    rows = _rows(repository, split)
    if "text" not in rows.column_names:
        raise DataError(f"{name} has no column 'text' (it has: {', '.join(rows.column_names)})")
    for batch in rows.select_columns(["text"]).iter(batch_size=256):
        yield from _texts(batch["text"], name)


@cache
def _rows(repository: str, split: str) -> "Dataset":
    from datasets import load_dataset

    try:
        return load_dataset(repository, split=split or "train")
    except Exception as error:  # the Hub, the network and each dataset's loader raise their own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{repository} is no file here and does not load as a Hub dataset ({reason})") from None


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
        _build(folder, (text for source in opened for text in read(source)), tokenizer)
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
            repository, _, split = source.partition(":")
            digest.update(f"hub {_rows(repository, split)._fingerprint}".encode())
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
