import io
from typing import Any

import pytest
from rich.console import Console

from ropex.train import report as reporting
from ropex.train.report import Report, duration, size


def line(step: int) -> dict[str, Any]:
    return {"step": step, "tokens_per_second": 1234.5, "loss": 3.25}


def test_a_terminal_gets_a_bar_with_stage_step_speed_and_loss() -> None:
    out = io.StringIO()
    report = Report(Console(file=out, force_terminal=True, width=120))
    with report.stage("warmup", 4, 1):
        report.step(line(2))
        report.say("a [bracket] in between")
        report.step(line(3))
    said = out.getvalue()
    for part in ("warmup", "3/4", "1,234 tokens/s", "loss 3.2500", "a [bracket] in between"):
        assert part in said


def test_elsewhere_come_lines_at_intervals_and_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(reporting.time, "monotonic", lambda: next(now) * 4.0)
    out = io.StringIO()
    report = Report(Console(file=out, width=200))
    with report.stage("joint", 10):
        for step in range(1, 11):
            report.step(line(step))
    lines = out.getvalue().splitlines()
    assert [text.split()[2] for text in lines] == ["1/10", "5/10", "9/10", "10/10"]
    assert lines[1] == "joint  step 5/10  1,234 tokens/s  loss 3.2500  0:20 left"


def test_durations_and_sizes_read_well() -> None:
    assert [duration(s) for s in (7, 750, 11_100)] == ["0:07", "12:30", "3:05:00"]
    assert [size(n) for n in (40 * 2**10, 512 * 2**20, 3.1 * 2**30)] == ["40 KiB", "512 MiB", "3.1 GiB"]
