"""What a run says while it goes: a bar on a terminal, a line at intervals elsewhere. Always on stderr."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 15.0


class Report:
    """Tells of a run on a console; a stage is a `with` block around its steps."""

    def __init__(self, console: Console | None = None, speaks: bool = True) -> None:
        """speaks: False in every process but the first."""
        self.console = console or Console(stderr=True, quiet=not speaks)
        self._bar: Progress | None = None
        self._stage, self._total, self._started, self._last_line, self._first = "", 0, 0.0, 0.0, 0

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=not self.console.is_terminal)

    def stage(self, name: str, total: int, done: int = 0) -> "Report":
        """Begin a stage of `total` steps, of which `done` were made in an earlier run."""
        self._stage, self._total, self._first = name, total, done
        self._started, self._last_line = time.monotonic(), float("-inf")
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(), console=self.console,
            )  # fmt: skip
            self._bar.add_task(name, total=total, completed=done, said="")
        return self

    def __enter__(self) -> "Report":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def step(self, line: dict[str, Any]) -> None:
        """A finished step, as its line in the log."""
        done = line["step"]
        said = f"{line['tokens_per_second']:,.0f} tokens/s  loss {line['loss']:.4f}"
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done, said=said)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or done == self._total:
            left = (now - self._started) / max(done - self._first, 1) * (self._total - done)
            self.say(f"{self._stage}  step {done}/{self._total}  {said}  {duration(left)} left")
            self._last_line = now


def duration(seconds: float) -> str:
    """0:07, 12:30, 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Bytes in the unit that reads best: 40 KiB, 512 MiB, 3.1 GiB."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
