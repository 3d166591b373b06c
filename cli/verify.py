"""ropex verify"""

from typing import Annotated

import typer

from ropex.cli.common import note, print_json, progress, stdout


def verify(
    checkpoint: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Read a checkpoint again and compare it with its index, its config and the hashes that ropex wrote.

    [bold]Examples[/bold]
      ropex verify nano-ada
      ropex verify ./my-model --json
    """
    from ropex.convert.verify import verify as read

    with progress() as say:
        result = read(checkpoint, say)
    if as_json:
        print_json(result)
        return
    hashes = f"{result['hashed']} of {result['files']} files have the hash they were written with"
    stdout().print(
        f"{result['path']}: {result['tensors']} tensors as index and config say, "
        + (hashes if result["files"] else "and no hashes to compare with")
    )
    for remark in result["notes"]:
        note(remark)
