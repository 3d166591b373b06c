"""ropex eval ruler"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropex.cli.common import (
    Dtype,
    Json,
    Out,
    Plot,
    goes_on,
    lengths,
    names,
    note,
    one_of,
    print_json,
    progress,
    stdout,
    table,
)


def ruler(
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(metavar="CKPT...", help="Checkpoints; PATH@yarn:2 applies a method on the fly."),
    ] = None,
    at: Annotated[str, typer.Option("--lengths", help="Context lengths, such as 4k,8k.")] = "4k",
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas, or all 13.")] = "all",
    samples: Annotated[int, typer.Option(help="Samples a task and length.")] = 500,
    seed: Annotated[int, typer.Option(help="The samples are a function of this.")] = 0,
    flavour: Annotated[str, typer.Option(help="The rules: nvidia or lm-eval.")] = "nvidia",
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Wrap prompts in the chat template.")] = False,
    essays: Annotated[
        str | None, typer.Option(metavar="PATH|pg", help="Text for five needle tasks. \\[default: pg, of the cache]")
    ] = None,
    squad: Annotated[Path | None, typer.Option(help="dev-v2.0.json for qa_1. \\[default: of the cache]")] = None,
    hotpot: Annotated[
        Path | None, typer.Option(help="hotpot_dev_distractor_v1.json for qa_2. \\[default: of the cache]")
    ] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help="Fetch what the cache folder lacks, and stop.")] = False,
    dtype: Dtype = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts at a time; halved where memory runs out. \\[default: by length]")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="What answers: hf (transformers), or vllm for stock checkpoints and exports.")
    ] = "hf",
    out: Out = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """RULER's 13 long-context tasks; needs lm-eval: pip install lm-eval wonderwords==2.2.0.

    [bold]Examples[/bold]
      ropex eval ruler ./SmolLM2-135M ./SmolLM2-135M@yarn:2 --tasks niah_single_1,vt --lengths 4k,8k --samples 20
      ropex eval ruler --prepare
      ropex eval ruler ./SmolLM2-135M my-run --lengths 4k,8k,16k -o results
    """
    sizes = lengths(at)
    one_of("--flavour", flavour, "nvidia", "lm-eval")
    one_of("--backend", backend, "hf", "vllm")
    if prepare:
        raise typer.Exit(_prepare(as_json))
    if not checkpoints:
        raise typer.BadParameter("name at least one checkpoint", param_hint="CKPT")
    from ropex.eval.plot import check_plot, plot_ruler
    from ropex.eval.ruler import evaluate_ruler

    if plot:
        check_plot(plot)
    elif out:
        plot = out / "ruler.png"
    with progress() as listener:
        report = evaluate_ruler(
            checkpoints,
            None if tasks.strip() == "all" else names(tasks),
            sizes,
            samples,
            seed,
            flavour=flavour,
            essays=essays,
            squad=squad,
            hotpot=hotpot,
            dtype=dtype,
            chat_template=chat_template,
            batch_size=batch_size,
            backend=backend,
            out=out,
            progress=listener,
        )
    if not goes_on():
        return
    if as_json:
        print_json(report)
    else:
        show_ruler(report)
    if plot:
        plot_ruler(report, plot)


def _prepare(as_json: bool) -> int:
    """Fetch the data; 1 where something is still missing."""
    from ropex.eval.ruler.prepare import prepare

    with progress() as listener:
        found = prepare(listener)
    if as_json:
        print_json({"data": found})
    else:
        shown = table("RULER's data", "name", "bytes", "path")
        for entry in found:
            shown.add_row(entry["name"], "-" if entry["bytes"] is None else f"{entry['bytes']:,}", entry["path"])
        stdout().print(shown)
        for entry in found:
            if entry["error"]:
                note(f"{entry['name']}: {entry['error']}")
    return int(any(entry["error"] for entry in found))


def show_ruler(report: dict[str, Any]) -> None:
    """Tasks down; a column for each length and checkpoint, those of a length side by side."""
    rows, console = report["results"], stdout()
    columns = sorted({(r["length"], r["checkpoint"], r["method"]) for r in rows}, key=lambda c: c[0])
    order = {name: i for i, name in enumerate(dict.fromkeys(r["checkpoint"] for r in rows))}
    columns.sort(key=lambda c: (c[0], order[c[1]]))
    cells = {(r["task"], r["length"], r["checkpoint"]): _cell(r["score"], r["interval"]) for r in rows}
    title = f"RULER, {report['settings']['samples']} samples each, in percent [95% interval]"
    shown = table(title, "task", *(f"{length:,}\n{name} ({method})" for length, name, method in columns))
    for task in dict.fromkeys(r["task"] for r in rows):
        shown.add_row(task, *(cells.get((task, length, name), "") for length, name, _ in columns))
    shown.add_section()
    means = {
        (row["length"], entry["checkpoint"]): (_cell(row["mean"], row["interval"]), row["tasks"])
        for entry in report["means"]
        for row in entry["lengths"]
    }
    counts = {count for _, count in means.values()}
    shown.add_row(
        f"mean of {'/'.join(map(str, sorted(counts)))}", *(means[length, name][0] for length, name, _ in columns)
    )
    console.print(shown)
    for entry in report["means"]:
        mine = [row for row in rows if row["checkpoint"] == entry["checkpoint"]]
        effective = f"{entry['effective_length']:,}" if entry["effective_length"] else "none of these"
        cut = 100 * sum(row["truncated"] for row in mine) / len(mine)
        bos = "with BOS" if mine[0]["bos"] else "without BOS"
        console.print(
            f"{entry['checkpoint']}: effective length (mean of at least 85.6) {effective}; prompts {bos}; "
            f"{cut:.0f}% of the answers were incomplete when they reached the limit of tokens"
        )
    for why, left in _grouped(report["not_run"]).items():
        note(f"not run: {', '.join(left)}: {why}")
    if "note" in report:
        note(report["note"])


def _cell(value: float, interval: list[float]) -> str:
    return f"{value:.1f} [{interval[0]:.0f}, {interval[1]:.0f}]"


def _grouped(not_run: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Tasks by the reason why they did not run."""
    found: dict[str, list[str]] = {}
    for entry in not_run:
        tasks = found.setdefault(entry["why"], [])
        if entry["task"] not in tasks:
            tasks.append(entry["task"])
    return found
