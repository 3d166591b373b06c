"""write_report: one HTML page that needs nothing but itself."""

from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ropex.errors import DataError, OutputError
from ropex.eval.files import write_whole
from ropex.eval.report.find import Report, alike, find_reports
from ropex.eval.report.kinds import KINDS, labelled
from ropex.eval.report.parts import Block, plainly

_TEMPLATE = "page.html"


def write_report(folders: Sequence[Path], out: Path, overwrite: bool = False) -> dict[str, Any]:
    """Write every table and figure of the folders' evaluations into one page, checkpoints side by side.

    The reports are those that `ropex eval ... --out` left in the folders and below them. The page loads nothing, runs
    no script and shows names as they are. It appears whole or not at all.

    Returns {"out", "reports": [{"folder", "kind", "checkpoints"}]}. Raises OutputError where `out` exists (without
    overwrite) or cannot be written, DataError where a folder has no report or one is damaged.
    """
    out = Path(out)
    _check(out, overwrite)
    reports = find_reports(folders)
    page = _page(reports)
    write_whole(out, lambda part: part.write_text(page, encoding="utf-8", errors="backslashreplace"))
    found = [
        {
            "folder": str(report.folder),
            "kind": report.kind,
            "checkpoints": list(dict.fromkeys(row["checkpoint"] for row in report.rows)),
        }
        for report in reports
    ]
    return {"out": str(out), "reports": found}


def _page(reports: Sequence[Report]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    blocks: dict[str, list[Block]] = {}
    for group in alike(reports):
        blocks.setdefault(group[0].kind, []).append(_block(group))
    sections = [{"id": kind, "kind": KINDS[kind], "blocks": of_kind} for kind, of_kind in blocks.items()]
    environment = Environment(
        loader=PackageLoader("ropex.eval.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(_TEMPLATE).render(
        sections=sections,
        made=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        version=version("ropex"),
        folders=len(reports),
    )


def _block(group: Sequence[Report]) -> Block:
    """The results of reports that were measured alike. DataError where their values are not what they should be."""
    block = Block(title=", ".join(dict.fromkeys(str(report.folder) for report in group)))
    try:
        KINDS[group[0].kind].fill(block, group, labelled(group))
        block.facts = [(name.replace("_", " "), plainly(value)) for name, value in group[0].settings.items()]
        for report in group:
            block.sources.append((str(report.folder), _holds(report)))
            if report.content.get("note"):
                block.notes.append(str(report.content["note"]))
            block.not_run += _not_run(report)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{' or '.join(str(r.folder) for r in group)} holds a {group[0].kind} report with values that do not fit "
            f"({type(error).__name__}: {error}): run that evaluation again"
        ) from error
    return block


def _holds(report: Report) -> str:
    checkpoints = ", ".join(dict.fromkeys(row["checkpoint"] for row in report.rows))
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items() if value)
    return f"{checkpoints}; {versions}" if versions else checkpoints


def _not_run(report: Report) -> list[tuple[str, str]]:
    """What was left out, by the reason why."""
    found: dict[str, dict[str, list[str]]] = {}
    for entry in report.content.get("not_run", []):
        name = " of ".join(str(entry[key]) for key in ("task", "checkpoint") if entry.get(key))
        lengths = found.setdefault(str(entry["why"]), {}).setdefault(name, [])
        if entry.get("length"):
            lengths.append(f"{entry['length']:,}")
    return [
        ("; ".join(f"{name} at {', '.join(at)}" if at else name for name, at in names.items()), why)
        for why, names in found.items()
    ]


def _check(out: Path, overwrite: bool) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"{out} is no name for a page: end it in .html")
    if out.is_dir():
        raise OutputError(f"{out} is a folder: name a file for the page")
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists: choose another name, or replace it with --overwrite")
    if not out.absolute().parent.is_dir():
        raise OutputError(f"{out.parent} does not exist: make that folder, or name another file")
