"""ropex eval tasks"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropex.cli.common import (
    Checkpoints,
    Dtype,
    Json,
    Out,
    goes_on,
    length,
    names,
    note,
    print_json,
    progress,
    stdout,
    table,
)


def tasks(
    checkpoints: Checkpoints,
    asked: Annotated[
        str, typer.Option("--tasks", help="lm-eval's tasks, groups or tags by commas; nlu and longbench are sets.")
    ] = "nlu",
    limit: Annotated[int | None, typer.Option(help="Documents a task, the first ones. \\[default: all]")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", help="Worked examples before a question. \\[default: the task's]")
    ] = None,
    max_length: Annotated[
        str | None, typer.Option("--max-length", help="Tokens of an input, such as 16k. \\[default: the checkpoint's]")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="Folder with YAML task files of your own.")
    ] = None,
    dtype: Dtype = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Inputs at a time; halved where memory runs out. \\[default: 8]")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tasks of lm-evaluation-harness, such as ARC or LongBench; needs lm-eval: pip install 'ropex\\[eval]'.

    [bold]Examples[/bold]
      ropex eval tasks ./SmolLM2-135M ./SmolLM2-135M@yarn:2 my-run --tasks nlu --limit 200
      ropex eval tasks my-run --tasks longbench --max-length 16k -o results/tasks
      ropex eval tasks my-run --tasks my_task --include-path my-tasks
      accelerate launch --num_processes 8 $(which ropex) eval tasks my-run --tasks nlu
    """
    tokens = length(max_length, "--max-length") if max_length else None
    from ropex.eval.plot import on_a_scale, plot_tasks
    from ropex.eval.tasks import evaluate_tasks

    with progress() as listener:
        report = evaluate_tasks(
            checkpoints, names(asked), limit=limit, num_fewshot=num_fewshot, max_length=tokens,
            include_path=include_path, dtype=dtype, batch_size=batch_size, out=out, progress=listener,
        )  # fmt: skip
    if not goes_on():
        return
    if as_json:
        print_json(report)
    else:
        show_tasks(report)
    if out and any(map(on_a_scale, report["results"])):
        plot_tasks(report, out / "tasks.png")


def show_tasks(report: dict[str, Any]) -> None:
    """Tasks and metrics down, checkpoints side by side; then what was left out."""
    rows = report["results"]
    columns = list(dict.fromkeys((row["checkpoint"], row["method"]) for row in rows))
    cells = {(r["checkpoint"], r["method"], r["task"], r["metric"]): _cell(r) for r in rows}
    shown = table("value ± standard error", "task", "metric", *(f"{name} ({method})" for name, method in columns))
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in rows):
        shown.add_row(task, metric, *(cells.get((*column, task, metric), "") for column in columns))
    means = {(e["set"], e["checkpoint"], e["method"]): e for e in report["means"]}
    for name in dict.fromkeys(entry["set"] for entry in report["means"]):
        shown.add_section()
        values = [means.get((name, *column)) for column in columns]
        cells_of_set = ["" if entry is None else f"{_cell(entry)} ({entry['tasks']}/{entry['of']})" for entry in values]
        shown.add_row(f"mean of {name}", "", *cells_of_set)
    stdout().print(shown)
    for entry in report["not_run"]:
        note(f"not run: {entry['task']}{' of ' + entry['checkpoint'] if entry['checkpoint'] else ''}: {entry['why']}")
    if "note" in report:
        note(report["note"])


def _cell(row: dict[str, Any]) -> str:
    if row["value"] is None:
        return "-"
    return f"{row['value']:.4f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.4f}")
