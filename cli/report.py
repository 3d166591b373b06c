"""ropex report"""

from pathlib import Path
from typing import Annotated

import typer

from ropex.cli.common import print_json, stdout, table


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that `ropex eval ... --out` wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write, such as report.html.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a page that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """One self-contained HTML page of the tables and figures of evaluations, checkpoints side by side.

    [bold]Example[/bold]
      ropex report results/nll results/ruler -o report.html
    """
    from ropex.eval.report import write_report

    written = write_report(folders, out, overwrite)
    if as_json:
        print_json(written)
        return
    shown = table(f"{written['out']} shows", "folder", "kind", "checkpoints")
    for one in written["reports"]:
        shown.add_row(one["folder"], one["kind"], ", ".join(one["checkpoints"]))
    stdout().print(shown)
