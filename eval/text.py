"""Evaluation text: plain files and folders of them, one document a file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ropex.errors import DataError

SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class Document:
    """One file's text. Documents are never joined: what follows a document's end is no context of its."""

    name: str
    text: str


def read_documents(paths: Iterable[Path]) -> list[Document]:
    """Read the files, and the .txt and .md files of the folders (sub-folders too, in name order).

    A file met twice is read once. Blank files are passed over. Raises DataError where a path is missing,
    is not UTF-8 text, or where nothing is left to read.
    """
    documents: list[Document] = []
    seen: set[Path] = set()
    for path in paths:
        for file in _files(Path(path)):
            if (resolved := file.resolve()) in seen:
                continue
            seen.add(resolved)
            text = _read(file)
            if text.strip():
                documents.append(Document(str(file), text))
    if not documents:
        raise DataError("no text to evaluate: name at least one .txt or .md file that is not blank")
    return documents


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not found:
            raise DataError(f"{path} holds no .txt or .md file: name a folder that does")
        yield from found
    elif not path.exists():
        raise DataError(f"{path} does not exist: name a .txt or .md file, or a folder of them")
    elif path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} is neither .txt nor .md: save the text under one of these names")
    else:
        yield path


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}): convert it to UTF-8") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): check its rights") from error
