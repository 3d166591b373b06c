"""ropex eval all"""

from pathlib import Path
from typing import Annotated

import typer

from ropex.cli.common import Checkpoints, Dtype, Json, fail, goes_on, lengths, names, print_json, progress, stdout


def everything(
    checkpoints: Checkpoints,
    data: Annotated[
        list[str], typer.Option(help="Unseen text for NLL and recall: files, folders, Hub datasets, or pg19.")
    ],
    at: Annotated[str, typer.Option("--lengths", help="Lengths in tokens, such as 4k,8k,16k.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for everything; a stopped run goes on there.")],
    windows: Annotated[int, typer.Option(help="Windows of each document for NLL.")] = 4,
    recall_windows: Annotated[int, typer.Option(help="Windows of each length for recall.")] = 4,
    samples: Annotated[int, typer.Option(help="Samples of each RULER task and length.")] = 50,
    style: Annotated[
        str, typer.Option(help="Of needles: passkey, or lines, which nano learned; then of recall too.")
    ] = "passkey",
    tasks: Annotated[str, typer.Option(help="lm-eval's tasks as well, such as nlu or arc_easy,piqa.")] = "",
    limit: Annotated[int | None, typer.Option(help="Documents of each of lm-eval's tasks. \\[default: all]")] = None,
    essays: Annotated[
        str | None, typer.Option(metavar="PATH|pg", help="Text for five RULER tasks. \\[default: pg, of the cache]")
    ] = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """NLL by position, needles, recall, RULER and tasks in one folder, with report.html to look at.

    [bold]Example[/bold]
      ropex eval all ./SmolLM2-135M ./SmolLM2-135M@yarn:2 my-run --data pg19 --lengths 8k,16k --tasks nlu -o results
    """
    sizes = lengths(at)
    from ropex.eval.everything import evaluate_all

    with progress() as listener:
        made = evaluate_all(
            checkpoints, sizes, out, data=data, windows=windows, recall_windows=recall_windows, samples=samples,
            style=style, tasks=names(tasks), limit=limit, essays=essays, dtype=dtype, progress=listener,
        )  # fmt: skip
    if not goes_on():
        return
    if as_json:
        print_json(made)
    for name, why in made["failed"].items():
        fail(f"{name} was not measured: {why}")
    if not as_json:
        stdout().print(f"{made['page']}: everything on one page, from the folders beside it")
    if made["failed"]:
        raise typer.Exit(1)
