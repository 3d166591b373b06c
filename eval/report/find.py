"""The report.json files below folders: read, checked, and those that were measured alike put together."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropex.errors import DataError
from ropex.eval.log import REPORT

NEEDED = {
    "nll": ("checkpoint", "method", "length", "mean", "tokens", "buckets", "documents"),
    "needle": ("checkpoint", "method", "lengths", "depths", "accuracy", "samples", "native_window"),
    "recall": ("checkpoint", "method", "length", "windows", "text", "near", "far", "formats", "distances"),
    "ruler": ("checkpoint", "method", "length", "task", "score", "interval", "fill", "truncated", "bos"),
    "tasks": ("checkpoint", "method", "task", "metric", "value", "stderr", "main"),
}
"""The kinds in the order of the page, and what each row of their results has."""


@dataclass(frozen=True)
class Report:
    """folder: as the user named it, and the way from there."""

    folder: Path
    kind: str
    content: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.content["results"])

    @property
    def settings(self) -> dict[str, Any]:
        """All but the versions, which stand with the folder."""
        return {k: v for k, v in self.content.get("settings", {}).items() if k != "versions"}

    @property
    def versions(self) -> dict[str, Any]:
        return dict(self.content.get("settings", {}).get("versions", {}))


def find_reports(folders: Sequence[Path]) -> list[Report]:
    """Every report.json in the folders and below them, each once, in the order of the folders and of their names.

    Raises DataError where a folder is missing or holds none, and where one is damaged or of another making.
    """
    found: dict[Path, Report] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder: name folders that `ropex eval ... --out` has written")
        paths = sorted(folder.rglob(REPORT))
        if not paths:
            raise DataError(f"{folder} holds no {REPORT}, nor does a folder in it: run `ropex eval ... --out {folder}`")
        for path in paths:
            if path.resolve() not in found:
                found[path.resolve()] = _read(path)
    return list(found.values())


def alike(reports: Sequence[Report]) -> Iterator[list[Report]]:
    """Groups of one kind whose numbers can stand side by side: the same settings, and for nll the same tokens."""
    for kind in NEEDED:
        groups: dict[str, list[Report]] = {}
        for report in reports:
            if report.kind == kind:
                groups.setdefault(json.dumps(_inputs(report), sort_keys=True), []).append(report)
        yield from groups.values()


def names(reports: Sequence[Report]) -> dict[tuple[int, str, str], str]:
    """A name for each (place of the report, checkpoint, method): the last part of its path where that tells them
    apart, and the folder of the report too where several reports have it."""
    keys = [
        key
        for at, report in enumerate(reports)
        for key in dict.fromkeys((at, row["checkpoint"], row["method"]) for row in report.rows)
    ]
    paths = {checkpoint for _, checkpoint, _ in keys}
    short = {path: path.rstrip("/").rpartition("/")[2] for path in paths}
    if len(set(short.values())) < len(paths):
        short = {path: path for path in paths}
    twice = {key[1:] for key in keys if sum(key[1:] == other[1:] for other in keys) > 1}
    return {key: short[key[1]] + (f" in {reports[key[0]].folder}" if key[1:] in twice else "") for key in keys}


def _inputs(report: Report) -> list[Any]:
    if report.kind != "nll":
        return [report.settings]
    texts = {(row["length"], *((d["name"], d["tokens"]) for d in row["documents"])) for row in report.rows}
    return [report.settings, sorted(texts)]


def _read(path: Path) -> Report:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable JSON ({error}): run that evaluation again") from None
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in NEEDED:
        raise DataError(f"{path} is no report of `ropex eval` ({', '.join(NEEDED)}): move it, or name other folders")
    rows = content.get("results")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} has no list of results: run that evaluation again")
    for name in NEEDED[kind]:
        if not all(name in row for row in rows):
            raise DataError(f"{path} lacks '{name}' in its results: run that evaluation again")
    return Report(path.parent, kind, content)
