"""The answers on disk, a JSON line each, so that a run that was stopped goes on where it stood."""

import json
import os
from pathlib import Path
from typing import Any

from ropex.errors import OutputError

KEY = ("checkpoint", "method", "task", "length", "seed", "index", "fingerprint")


class AnswerLog:
    """Answers by key, read from `path` at first and appended to it one by one; in memory only without a path.

    A last line cut off by a crash is dropped. Raises OutputError for a file that is no such log.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = None if path is None else Path(path)
        self._records: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self.path and self.path.exists():
            self._load(self.path)

    def get(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The answer under the key's values, or None."""
        return self._records.get(_values(key))

    def add(self, record: dict[str, Any]) -> None:
        """Keep the answer, on disk before the call returns."""
        self._records[_values(record)] = record
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written ({error.strerror}): name another file") from error

    def _load(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise OutputError(f"{path} cannot be read ({error.strerror}): name another file") from error
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                self._records[_values(record)] = record
            except (ValueError, KeyError, TypeError) as error:
                raise OutputError(
                    f"{path}, line {number}, is no answer of an earlier run: name another file"
                ) from error
        if len(whole) < len(data):
            if not self._records and data.strip()[:1] != b"{":
                raise OutputError(f"{path} is no log of an earlier run: name another file")
            os.truncate(path, len(whole))


def _values(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in KEY)
