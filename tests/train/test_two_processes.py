"""Two processes that share each step's windows train what one does that takes them all."""

from pathlib import Path
from typing import Any

import pytest
from processes import assert_same_run, in_two

from ropex.train.extend import extend


@pytest.mark.parametrize("more", [{"window": 64}, {"pack": True, "target": 128}])
def test_losses_and_weights_are_those_of_one_process(
    checkpoint: Path, text: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    asked = {
        "target": 256, "data": [str(text)], "steps_warmup": 3, "steps_joint": 3, "save_steps": 2, "dtype": "float32",
        "lr_lora": 1e-3, **more,
    }  # fmt: skip
    extend(checkpoint, tmp_path / "one", accumulation=2, **asked)
    in_two(checkpoint, tmp_path / "two", asked)
    assert_same_run(tmp_path / "two", tmp_path / "one", rtol=1e-3, atol=1e-5, loss=1e-6, norm=1e-3)
    kept = {p.name for p in (tmp_path / "two" / "joint" / "checkpoint-3").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "manifest.json"} <= kept
