"""What the commands share: lengths, files, tables, JSON and progress."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


Checkpoints = Annotated[
    list[str], typer.Argument(metavar="CKPT...", help="Checkpoints; PATH@yarn:2 applies a method on the fly.")
]


def known_dtype(name: str | None) -> str | None:
    """Refuse an unknown dtype before anything is read."""
    if name:
        from ropex.loading import as_dtype

        as_dtype(name)
    return name


Dtype = Annotated[
    str | None,
    typer.Option(callback=known_dtype, help="Compute in float32, bfloat16 or float16. \\[default: as stored]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Out = Annotated[
    Path | None, typer.Option("-o", "--out", help="Folder for results, report and figure; a stopped run goes on there.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the figure into this .png, .svg or .pdf.")]


@dataclass
class State:
    """Options that stand before the command."""

    debug: bool = False


state = State()


def stderr() -> "Console":
    from rich.console import Console

    return Console(stderr=True)


def stdout() -> "Console":
    """A console for results. Piped output is as wide as its content, so that no table is cut."""
    from rich.console import Console

    plain: Any = {"markup": False, "highlight": False}  # paths are no markup
    console = Console(**plain)
    return console if console.is_terminal else Console(width=200, **plain)


def fail(message: str) -> None:
    """One line on stderr."""
    typer.echo(f"ropex: {' '.join(message.split())}", err=True)


def note(message: str) -> None:
    """A remark that is no result, on stderr."""
    typer.echo(f"note: {message}", err=True)


def length(text: str, option: str) -> int:
    """Tokens from '16384', '16k' or '1m' (k = 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmM]?)", text.strip())
    if not match:
        raise typer.BadParameter(f"'{text}' is not a length: write 16384 or 16k", param_hint=option)
    tokens = float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]
    if tokens != int(tokens) or tokens < 1:
        raise typer.BadParameter(f"'{text}' is not a whole number of tokens: write 16384 or 16k", param_hint=option)
    return int(tokens)


def lengths(text: str, option: str = "--lengths") -> list[int]:
    """Tokens from '4k,8k,16k'."""
    return [length(part, option) for part in text.split(",")]


def names(text: str) -> list[str]:
    """'a,b' as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def one_of(option: str, value: str, *allowed: str) -> None:
    """Refuse a value that is none of the allowed ones."""
    if value not in allowed:
        raise typer.BadParameter(f"'{value}': choose {', '.join(allowed[:-1])} or {allowed[-1]}", param_hint=option)


def settings(pairs: list[str]) -> dict[str, Any]:
    """'key=value' options: numbers as numbers, a .json file as its content, the rest as text."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"'{pair}' is not a setting: write --set key=value")
        if value.endswith(".json"):
            try:
                out[key] = json.loads(Path(value).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise typer.BadParameter(f"{value} is not readable JSON ({error})") from None
            continue
        try:
            out[key] = float(value)
        except ValueError:
            out[key] = value
    return out


def print_json(value: dict[str, Any]) -> None:
    """One JSON document on stdout; nothing else goes there with --json."""
    typer.echo(json.dumps(value, allow_nan=False, default=str))


def table(title: str, *columns: str) -> "Table":
    """A table whose first column is text and whose others are numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_header=any(columns))
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", overflow="fold")
    return made


def goes_on() -> bool:
    """Part from the processes that shared the work; true in the first, which has the rest to do."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    everyone = PartialState()
    first = bool(everyone.is_main_process)
    everyone.destroy_process_group()
    everyone.distributed_type, everyone.num_processes = DistributedType.NO, 1  # what is left to do is done alone
    return first


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A listener (what, done, total): a bar on a terminal's stderr, elsewhere a line when the work changes."""
    console = stderr()
    if not console.is_terminal:
        said: set[str] = set()

        def line(what: str, done: int, total: int) -> None:
            if what not in said:
                said.add(what)
                typer.echo(f"{what} ({done}/{total})", err=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
