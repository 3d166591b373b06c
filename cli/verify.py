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
    stdout().print(
        f"{result['path']}: whole. {result['tensors']} tensors as index and config say, {result['hashed']} of "
        f"{result['files']} files with the hash they were written with"
    )
    for remark in result["notes"]:
        note(remark)
