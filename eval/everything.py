"""Every evaluation of a set of checkpoints in one folder, and the page that shows it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ropex.errors import OptionError, OutputError, RopexError
from ropex.eval.grid import evaluate_needle
from ropex.eval.nll import evaluate_nll
from ropex.eval.plot import on_a_scale, plot_needle, plot_nll, plot_recall, plot_ruler, plot_tasks
from ropex.eval.progress import Progress
from ropex.eval.recall import evaluate_recall
from ropex.eval.report import write_report
from ropex.eval.ruler import evaluate_ruler
from ropex.eval.share import processes
from ropex.eval.tasks import evaluate_tasks
from ropex.facts import MEASURED

PAGE, KINDS = "report.html", ("nll", "needle", "recall", "ruler", "tasks")


def evaluate_all(
    checkpoints: Sequence[str],
    lengths: Sequence[int],
    out: Path,
    *,
    data: Sequence[str | Path],
    windows: int | None = 4,
    recall_windows: int = 4,
    samples: int = 50,
    style: str = "passkey",
    tasks: Sequence[str] = (),
    limit: int | None = None,
    essays: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """NLL, needles, recall, RULER and, where some are named, lm-eval's tasks, into the folders nll, needle, recall,
    ruler and tasks of `out`, and report.html beside them.

    data: unseen text for NLL, of which each document gives so many windows (None: all it has), and for recall, which
    takes recall_windows of each length. samples: of each RULER task and length. style: of the needles; with "lines"
    recall has that format alone, otherwise all. limit: documents of each of lm-eval's tasks. The rest as the single
    evaluations take it. What is in the folder already is not measured again. An evaluation that cannot be made does not
    keep the others from being made.

    Returns {"nll", "needle", "recall", "ruler", "tasks": their reports, "failed": {name: why}, "page"}. Raises the
    first error where none could be made.
    """
    if not data:
        raise OptionError("no text for NLL and recall: name it with --data")
    formats = ("lines",) if style == "lines" else tuple(MEASURED)
    common: dict[str, Any] = {"dtype": dtype, "progress": progress}
    kinds: dict[str, tuple[Callable[[Path], dict[str, Any]], Callable[[dict[str, Any], Path], None]]] = {
        "nll": (
            lambda folder: evaluate_nll(checkpoints, data, lengths, windows=windows, out=folder, **common),
            plot_nll,
        ),
        "needle": (
            lambda folder: evaluate_needle(checkpoints, lengths, style=style, out=folder, **common),
            plot_needle,
        ),
        "recall": (
            lambda folder: evaluate_recall(
                checkpoints, lengths, formats=formats, windows=recall_windows, data=data, out=folder, **common
            ),
            plot_recall,
        ),
        "ruler": (
            lambda folder: evaluate_ruler(
                checkpoints, None, lengths, samples, essays=essays, out=folder, **common
            ),
            plot_ruler,
        ),
    }  # fmt: skip
    if tasks:
        kinds["tasks"] = (
            lambda folder: evaluate_tasks(checkpoints, tasks, limit=limit, out=folder, **common),
            plot_tasks,
        )
    strange = sorted(p.name for p in out.iterdir() if p.name not in (*KINDS, PAGE)) if out.is_dir() else []
    if strange or (out / PAGE).exists() and not any((out / kind).is_dir() for kind in KINDS):
        raise OutputError(f"{out} holds other things ({(strange or [PAGE])[0]}): name a new folder or an empty one")
    first = processes().is_main_process
    made: dict[str, Any] = {}
    failed: dict[str, RopexError] = {}
    for name, (measure, plot) in kinds.items():
        try:
            made[name] = measure(out / name)
        except RopexError as error:
            failed[name] = error
            continue
        if first and (name != "tasks" or any(map(on_a_scale, made[name]["results"]))):
            plot(made[name], out / name / f"{name}.png")
    if not made:
        raise next(iter(failed.values()))
    if first:
        write_report([out / name for name in made], out / PAGE, overwrite=True)
    return made | {"failed": {name: str(error) for name, error in failed.items()}, "page": str(out / PAGE)}
