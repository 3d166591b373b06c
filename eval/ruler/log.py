"""The answers on disk, a JSON line each, so that a run that was stopped goes on where it stood."""

import json
import os
from pathlib import Path
from typing import Any

from ropex.errors import OutputError

KEY = ("checkpoint", "method", "task", "length", "seed", "index", "fingerprint")


ANSWERS, REPORT = "answers.jsonl", "report.json"


class AnswerLog:
    """Answers by key, read from the folder's answers.jsonl at first and appended to it one by one; without a folder,
    in memory only.

    A last line cut off by a crash is dropped. Raises OutputError for a folder with other things in it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._records: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise OutputError(f"{self.folder} is a file: name a folder for the answers and the report")
        self.path = self.folder / ANSWERS
        if self.path.exists():
            self._load(self.path)
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise OutputError(f"{self.folder} holds other things and no {ANSWERS}: name an empty or a new folder")

    def get(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The answer under the key's values, or None."""
        return self._records.get(_values(key))

    def add(self, record: dict[str, Any]) -> None:
        """Keep the answer, on disk before the call returns."""
        self._records[_values(record)] = record
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written ({error.strerror}): name another folder") from error

    def finish(self, report: dict[str, Any]) -> None:
        """Write the report beside the answers, whole or not at all, over an earlier one."""
        if self.folder is None:
            return
        path, part = self.folder / REPORT, self.folder / f".{REPORT}-{os.getpid()}"
        try:
            part.write_text(json.dumps(report, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise OutputError(f"{path} cannot be written ({error.strerror}): free some space and run again") from error
        finally:
            part.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise OutputError(f"{path} cannot be read ({error.strerror}): name another folder") from error
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                self._records[_values(record)] = record
            except (ValueError, KeyError, TypeError) as error:
                raise OutputError(
                    f"{path}, line {number}, is no answer of an earlier run: name another folder"
                ) from error
        if len(whole) < len(data):
            if not self._records and data.strip()[:1] != b"{":
                raise OutputError(f"{path} is no log of an earlier run: name another folder")
            os.truncate(path, len(whole))


def _values(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in KEY)
