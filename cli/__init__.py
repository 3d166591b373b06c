"""The command line. Each command parses, calls one function of the library, and prints; torch is imported there."""

import io
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from ropex.cli import convert, demo, evaluate, export, extend, inspect, lab, report, verify
from ropex.cli.common import fail, state
from ropex.errors import RopexError

app = typer.Typer(
    name="ropex",
    help="Convert, extend, measure and export the rotary embedding of language-model checkpoints.",
    epilog="Start with:  ropex demo   ·   ropex inspect nano   ·   ropex COMMAND --help",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (inspect, convert, extend, export, report, verify, demo):
    app.command()(getattr(module, module.__name__.rpartition(".")[2]))
app.add_typer(evaluate.app, name="eval")
app.add_typer(lab.app, name="lab")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ropex {version('ropex')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show where in the code it arose.")] = False,
) -> None:
    state.debug = debug


def main() -> None:
    """The console script: an error of the user's is one line and exit code 1; usage errors exit with 2."""
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that half-written outputs are removed
    try:
        app()
    except RopexError as error:
        if state.debug:
            raise
        fail(str(error))
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != 130:
            raise
        fail("interrupted: nothing half-made is left, and what a folder of results holds stays")
        sys.exit(130)
