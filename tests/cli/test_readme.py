"""Every ropex command that a page shows must be one that the command line takes."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from ropex.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "demo" / "nano" / "README.md"]


def shown(page: Path) -> list[list[str]]:
    """The words of every `ropex ...` line in the page's code blocks, continuation lines joined, comments dropped."""
    blocks = re.findall(r"```(?:sh|console|)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    calls = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(call, comments=True)[1:] for call in calls if re.match(r"(\S*/)?ropex ", call)]


COMMANDS = [(page.name, words) for page in PAGES for words in shown(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_a_command_shown_parses(page, words):
    command, context = get_command(app), None
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"{page}: no command {name}"
        command = command.commands[name]
    context = command.make_context(command.name, list(words))  # raises a usage error where an option is wrong
    assert context.params


def test_the_pages_show_the_commands():
    assert len(COMMANDS) >= 6
