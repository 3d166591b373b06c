"""Text to train on and to measure with: files, folders of them, and Hub datasets."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ropex.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

TEXT = (".txt", ".md")
TABLES = (".jsonl", ".parquet")
_NAMED = {"pg19": "emozilla/pg19"}


@dataclass(frozen=True)
class Document:
    """One text and where it is from. Documents are never joined: what follows a document's end is no context of it."""

    name: str
    text: str


def sources(data: Iterable[str | Path], split: str = "train") -> list[str | Path]:
    """Files (folders opened up) and Hub ids with a split (owner/name:split), in the order given and no file twice; what
    is neither is an error. `pg19` is a name of its own. split: of the Hub ids that name none."""
    found: list[str | Path] = []
    for item in map(str, data):
        path = Path(item).expanduser()
        name, _, named = item.partition(":")
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT + TABLES and p.is_file())
            if not files:
                raise DataError(f"{item} holds no {', '.join(TEXT + TABLES)} file: give a folder of texts")
            found += files
        elif path.is_file():
            if path.suffix.lower() not in TEXT + TABLES:
                raise DataError(f"{item}: '{path.suffix}' is not read: give one of {', '.join(TEXT + TABLES)}")
            found.append(path)
        elif name in _NAMED:
            found.append(f"{_NAMED[name]}:{named or split}")
        elif path.suffix.lower() in TEXT + TABLES or item.startswith((".", "/", "~")) or item.count("/") != 1:
            raise DataError(f"{item} does not exist: give a file, a folder or a Hub dataset (owner/name)")
        else:
            found.append(f"{name}:{named or split}")
    if not found:
        raise DataError("no text: give --data a file, a folder or a Hub dataset (owner/name)")
    unique: dict[str | Path, str | Path] = {}
    for source in found:
        unique.setdefault(source.resolve() if isinstance(source, Path) else source, source)
    return list(unique.values())


def read(source: str | Path) -> Iterator[Document]:
    """The documents of one source: a text file is one, a .jsonl line or table row with `text` is one."""
    if isinstance(source, Path) and source.suffix.lower() in TEXT:
        yield Document(str(source), _decoded(source))
        return
    if isinstance(source, str):
        texts = _hub(source)
    elif source.suffix.lower() == ".jsonl":
        texts = _json_lines(source)
    else:
        texts = _parquet(source)
    for number, text in enumerate(texts, 1):
        yield Document(f"{source}, document {number}", text)


def read_all(data: Iterable[str | Path], split: str = "train") -> list[Document]:
    """Every document that is not blank. Errors: DataError, also where none is left."""
    documents = [d for source in sources(data, split) for d in read(source) if d.text.strip()]
    if not documents:
        raise DataError("no text: every document given is blank")
    return documents


def hub_fingerprint(source: str) -> str:
    """What changes when a Hub dataset (owner/name:split) does."""
    return str(_rows(source)._fingerprint)


def _decoded(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): convert it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _json_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                    text.encode()  # half a surrogate pair is no text
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
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
    """Of a Hub dataset's split, owner/name:split."""
    rows = _rows(name)
    if "text" not in rows.column_names:
        raise DataError(f"{name} has no column 'text' (it has: {', '.join(rows.column_names)})")
    for batch in rows.select_columns(["text"]).iter(batch_size=256):
        yield from _texts(batch["text"], name)


@cache
def _rows(name: str) -> "Dataset":
    from datasets import load_dataset

    repository, _, split = name.partition(":")
    try:
        return load_dataset(repository, split=split)
    except Exception as error:  # the Hub, the network and each dataset's loader raise their own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{repository} is no file here and does not load as a Hub dataset ({reason})") from None


def _texts(values: Iterable[object], where: str) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise DataError(f"{where}: the column 'text' holds {value!r:.40}, not text")
        yield value
