"""Two processes that share each step's windows train what one does that takes them all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ropex.train.extend import extend

SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from ropex.train.extend import extend
src, out, arguments = json.loads(sys.argv[1])
extend(src, out, **arguments)
"""


def in_two(script: Path, source: Path, out: Path, arguments: dict[str, Any]) -> None:
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(
        [*launch, json.dumps([str(source), str(out), arguments])], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[:6000]


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("more", [{"window": 64}, {"pack": True, "target": 128}])
def test_losses_and_weights_are_those_of_one_process(
    checkpoint: Path, text: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    asked = {
        "target": 256, "data": [str(text)], "steps_warmup": 3, "steps_joint": 3, "save_steps": 2, "dtype": "float32",
        "lr_lora": 1e-3, **more,
    }  # fmt: skip
    extend(checkpoint, tmp_path / "one", accumulation=2, **asked)
    in_two(tmp_path / "run.py", checkpoint, tmp_path / "two", asked)
    one, two = log(tmp_path / "one"), log(tmp_path / "two")
    assert [line["windows"] for line in one] == [line["windows"] for line in two]
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    first, second = (load_file(tmp_path / name / "trained.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-5)
    kept = {p.name for p in (tmp_path / "two" / "joint" / "checkpoint-3").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "manifest.json"} <= kept
