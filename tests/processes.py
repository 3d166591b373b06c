"""Runs of ropex.train in two gloo processes, and what they are held to."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # what `accelerate launch` sets
EXTEND = """
import json, sys
from ropex.train.extend import extend
src, out, arguments = json.loads(sys.argv[1])
extend(src, out, **arguments)
"""


def in_two(
    source: Path, out: Path, arguments: dict[str, Any], script: str = EXTEND, fails: bool = False, **env: str
) -> str:
    """What a script says that gets (source, out, arguments) in two processes."""
    path = out.with_name(f"{out.name}.py")
    path.write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    run = subprocess.run(
        [*launch, json.dumps([str(source), str(out), arguments])],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )  # fmt: skip
    assert (run.returncode != 0) == fails, run.stderr[:6000]
    return run.stderr


def log_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log without their times."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def assert_same_run(run: Path, other: Path, rtol: float, atol: float, loss: float, norm: float) -> None:
    """One run read the windows of another, had its losses and gradient norms, and trained its tensors."""
    ours, theirs = log_of(run), log_of(other)
    assert [line["windows"] for line in ours] == [line["windows"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=loss)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=norm)
    first, second = (load_file(folder / "trained.safetensors") for folder in (run, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        torch.testing.assert_close(tensor, second[name], rtol=rtol, atol=atol)
