"""A killed run, resumed, ends with the bits of one that was never killed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ropex.train.extend import extend

# Kills itself at a step: when its line is logged, or when its checkpoint is written but not yet in place.
KILLED = """
import json, os, signal, sys
import torch
from ropex.train import atomic, runfolder
from ropex.train.extend import extend

torch.set_num_threads(1)
src, out, arguments, where, stage, step = json.loads(sys.argv[1])
append, publish = runfolder.append_log, atomic.publish

def log(place, line):
    append(place, line)
    if where == "step" and (line["stage"], line["step"]) == (stage, step):
        os.kill(os.getpid(), signal.SIGKILL)

def rename(folder, place):
    if where == "checkpoint" and (place.parent.name, place.name) == (stage, f"checkpoint-{step}"):
        os.kill(os.getpid(), signal.SIGKILL)
    publish(folder, place)

runfolder.append_log, atomic.publish = log, rename
extend(src, out, **arguments)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The tiny checkpoint with dropout, so that random numbers count."""
    folder = tmp_path_factory.mktemp("dropout") / "checkpoint"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    return folder


@pytest.fixture(scope="module")
def arguments(text: Path) -> dict[str, Any]:
    return {
        "target": 256, "window": 64, "data": [str(text)], "steps_warmup": 5, "steps_joint": 5, "save_steps": 2,
        "accumulation": 2, "lr_lora": 1e-2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, source: Path, arguments: dict[str, Any]) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    extend(source, out, console=Console(quiet=True), **arguments)
    return out


def killed(source: Path, out: Path, arguments: dict[str, Any], where: str, stage: str, step: int) -> None:
    told = json.dumps([str(source), str(out), arguments, where, stage, step])
    done = subprocess.run([sys.executable, "-c", KILLED, told], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr


def log_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def assert_same(run: Path, other: Path) -> None:
    for stage in ("warmup", "joint", "."):
        assert (run / stage / "trained.safetensors").read_bytes() == (
            other / stage / "trained.safetensors"
        ).read_bytes()
    assert log_of(run) == log_of(other)


def test_killed_in_both_stages_and_while_a_checkpoint_is_written(
    tmp_path: Path, source: Path, arguments: dict[str, Any], uninterrupted: Path
) -> None:
    out = tmp_path / "run"
    killed(source, out, arguments, "step", "warmup", 3)
    assert (out / "warmup" / "checkpoint-2").is_dir()
    assert not (out / "warmup" / "trained.safetensors").exists()
    killed(source, out, arguments | {"resume": True}, "checkpoint", "joint", 4)
    assert (out / "joint" / ".partial" / "checkpoint-4").is_dir()
    assert not (out / "joint" / "checkpoint-4").exists()
    torch.manual_seed(99)  # nothing may depend on what was drawn before
    extend(source, out, resume=True, console=Console(quiet=True), **arguments)
    assert_same(out, uninterrupted)


def test_killed_before_the_first_checkpoint_of_either_stage(
    tmp_path: Path, source: Path, arguments: dict[str, Any], uninterrupted: Path
) -> None:
    out = tmp_path / "run"
    killed(source, out, arguments, "step", "warmup", 1)
    killed(source, out, arguments | {"resume": True}, "step", "joint", 1)
    with (out / "log.jsonl").open("a") as log:
        log.write('{"stage": "joint", "st')  # what a kill in the middle of a line leaves
    torch.manual_seed(99)  # nothing may depend on what was drawn before
    extend(source, out, resume=True, console=Console(quiet=True), **arguments)
    assert_same(out, uninterrupted)


def test_a_damaged_newest_checkpoint_is_skipped_aloud(
    tmp_path: Path, source: Path, arguments: dict[str, Any], uninterrupted: Path
) -> None:
    import io
    import shutil

    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    for folder in (out, out / "joint"):
        (folder / "trained.safetensors").unlink()
    newest = out / "joint" / "checkpoint-5"
    (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:-100])
    said = io.StringIO()
    extend(source, out, resume=True, console=Console(file=said, width=400), **arguments)
    assert f"{newest} is damaged and skipped" in said.getvalue()
    assert "stage joint continues after step 4" in said.getvalue()
    assert_same(out, uninterrupted)


def test_a_checkpoint_holds_what_was_trained_and_no_backbone(uninterrupted: Path) -> None:
    kinds = {}
    for stage, step in (("warmup", 5), ("joint", 5)):
        tensors = load_file(uninterrupted / stage / f"checkpoint-{step}" / "trained.safetensors")
        kinds[stage] = {name.rpartition(".")[2] for name in tensors}
        for name, tensor in load_file(uninterrupted / stage / "trained.safetensors").items():
            assert tensor.equal(tensors.pop(name))
        assert not tensors
    assert kinds["warmup"] == {"theta0", "delta", "tau", "gamma"}
    assert kinds["joint"] == kinds["warmup"] | {"lora_A", "lora_B"}
