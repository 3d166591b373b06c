"""What an evaluation has measured, on disk as it comes, so that a run that was stopped goes on where it stood."""

import json
import os
from pathlib import Path
from typing import Any

from ropex.errors import OutputError

REPORT = "report.json"


class Log:
    """Records by key, a JSON line each, read from the folder's file at first and appended to it one by one; without a
    folder, in memory only.

    file: its name in the folder. key: names of the values that tell records apart. A last line cut off by a crash is
    dropped. All processes read, the first writes. Errors: OutputError for a folder with other things in it.
    """

    def __init__(self, folder: Path | None, file: str, key: tuple[str, ...]) -> None:
        self.folder = None if folder is None else Path(folder)
        self.key = key
        self._records: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise OutputError(f"{self.folder} is a file: name a folder for the results")
        self.path = self.folder / file
        if self.path.exists():
            self._load(self.path)
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise OutputError(f"{self.folder} holds other things and no {file}: name an empty or a new folder")
        _processes().wait_for_everyone()  # all have read what is there before any adds to it

    def get(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The record under the key's values, or None."""
        return self._records.get(self._values(key))

    def add(self, record: dict[str, Any]) -> None:
        """Keep the record, on disk before the call returns."""
        self._records[self._values(record)] = record
        if self.folder is None or not _processes().is_main_process:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written ({error.strerror}): name another folder") from error

    def finish(self, report: dict[str, Any]) -> None:
        """Write report.json beside the records, whole or not at all, over an earlier one."""
        if self.folder is None or not _processes().is_main_process:
            return
        path, part = self.folder / REPORT, self.folder / f".{REPORT}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
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
                self._records[self._values(record)] = record
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise OutputError(
                    f"{path}, line {number}, is no result of an earlier run: name another folder"
                ) from error
        if len(whole) < len(data):
            if not self._records and data.strip()[:1] != b"{":
                raise OutputError(f"{path} is no log of an earlier run: name another folder")
            if _processes().is_main_process:
                os.truncate(path, len(whole))

    def _values(self, record: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(record[name] for name in self.key)


def _processes() -> Any:
    from ropex.eval.share import processes  # imports torch, which reading reports does without

    return processes()
