"""The GPU benchmark runs to its end on a CPU, at toy size, and says where it ran."""

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_it_runs_and_names_its_device(tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", "--data", ROOT / "demo" / "text" / "dev.txt",
         "--out", tmp_path, "--windows", "256", "--steps", "2", "--dtype", "float32"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    assert f"ran on {device}" in run.stdout
    rows = [line for line in run.stdout.splitlines() if line.startswith("| 256 | sdpa")]
    assert len(rows) == 2 and all(float(row.split("|")[4].replace(",", "")) > 0 for row in rows)
