"""`ropex eval ruler` on the checkpoint that ships with ropex, offline, in processes of its own."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropex.cli import main
from ropex.eval.ruler import TASKS

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

Ruler = Callable[..., tuple[int, str, str]]
MAIN = [sys.executable, "-c", "from ropex.cli import main; main()", "eval", "ruler"]


@pytest.fixture()
def ruler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """ruler(*arguments) -> exit code, stdout, stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ropex", "eval", "ruler", *map(str, args)])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        else:
            code = 0
        assert isinstance(code, int | None)
        return code or 0, *capsys.readouterr()

    return call


def test_all_13_tasks_run_offline_at_2k(tmp_path: Path, data: Any, ruler: Ruler) -> None:
    options = ["--essays", data.essays, "--squad", data.squad, "--hotpot", data.hotpot]
    code, out, err = ruler("nano", "--lengths", "2k", "--samples", 1, *options, "-o", tmp_path / "out", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [row["task"] for row in report["results"]] == list(TASKS)
    assert report["not_run"] == []
    assert report["means"][0]["lengths"][0]["tasks"] == 13
    assert all(row["bos"] and row["fill"] <= 1 for row in report["results"])
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert (tmp_path / "out" / "ruler.png").read_bytes()[:4] == b"\x89PNG"
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    limits = {task.name: task.tokens_to_generate for task in TASKS.values()}
    assert all(answer["prompt_tokens"] + limits[answer["task"]] <= 2048 for answer in answers)


def test_a_killed_run_resumes_to_the_same_report(tmp_path: Path, ruler: Ruler) -> None:
    """RX-45: three tasks, two lengths, kill -9 after the first answers."""
    tasks = ["--tasks", "niah_single_1,fwe,niah_multikey_2", "--samples", "1"]
    options = ["nano", "--lengths", "500,600", *tasks]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    process = subprocess.Popen([*MAIN, *options, "-o", str(cut)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = cut / "answers.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_bytes().count(b"\n") > 1):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cut / "report.json").exists()
    before = log.read_bytes().count(b"\n")
    assert before < 6
    for folder in (cut, whole):
        assert ruler(*options, "-o", folder)[0] == 0
    assert log.read_bytes() == (whole / "answers.jsonl").read_bytes()
    assert (cut / "report.json").read_text() == (whole / "report.json").read_text()


def test_the_table_puts_checkpoints_side_by_side(ruler: Ruler) -> None:
    tasks = ["--tasks", "fwe,niah_single_2", "--samples", 1]
    code, out, err = ruler("nano", "nano@yarn:8", "--lengths", "500,600", *tasks)
    assert code == 0, err
    (head,) = [line for line in out.splitlines() if "task" in line]
    assert head.split() == ["task", *["nano", "(rope)", "nano@yarn:8", "(yarn)"] * 2]
    assert "mean of 1" in out
    assert "nano@yarn:8: effective length (mean of at least 85.6) none of these; prompts with BOS" in out
    assert "not run: niah_single_2: no essays here" in err


@pytest.mark.parametrize(
    ("args", "said", "code"),
    [
        (["nano", "--lengths", "100", "--tasks", "vt"], "vt does not fit length 100", 1),
        (["nano", "--lengths", "2k", "--tasks", "vt,niah"], "unknown RULER task 'niah'", 1),
        (["nano", "--lengths", "2k", "--tasks", "qa_1"], "give --squad PATH", 1),
        (["nano", "--chat-template"], "no chat template", 1),
        (["nano", "--flavour", "meta"], "choose nvidia or lm-eval", 2),
        (["--lengths", "2k"], "name at least one checkpoint", 2),
    ],
)
def test_errors_are_one_line_that_names_the_cure(args: list[str], said: str, code: int, ruler: Ruler) -> None:
    got, out, err = ruler(*args)
    assert (got, out) == (code, "")
    assert said in " ".join(err.split())
    assert code == 2 or err.count("\n") == 1
