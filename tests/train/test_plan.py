from collections.abc import Callable
from pathlib import Path

import pytest

from ropex import attach, make_spec
from ropex.errors import OptionError
from ropex.seam import rope_of_model
from ropex.train import plan as module
from ropex.train.extend import extend
from ropex.train.memory import estimate
from ropex.train.plan import plan
from ropex.train.settings import Settings


def test_a_plan_counts_each_stage_from_headers_alone(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").stat()
    result = plan(str(checkpoint), target=1024, window=256, lora_r=8)
    warmup, joint = result["stages"]["warmup"], result["stages"]["joint"]
    numbers = 2 * (2 * 8 + 2 * 8)  # two layers: delta [2, 8], tau and gamma [8]
    lora = 2 * 8 * (128 + 128 + 128 + 32)  # two layers, rank 8: A and B of q [128, 128] and k [32, 128]
    assert warmup["optimiser"] == 12 * numbers and joint["optimiser"] == 12 * (numbers + lora)
    assert warmup["total"] == sum(v for k, v in warmup.items() if k != "total")
    assert warmup["activations"] > plan(str(checkpoint), target=1024, window=64)["stages"]["warmup"]["activations"]
    assert result["notes"] == []


def test_shards_split_the_backbone_alone(checkpoint: Path) -> None:
    one, four = (plan(str(checkpoint), n, target=1024, window=256)["stages"]["warmup"] for n in (1, 4))
    assert four["parameters"] == pytest.approx(one["parameters"] / 4, rel=0.01)
    assert [four[name] for name in ("optimiser", "activations", "logits")] == [
        one[name] for name in ("optimiser", "activations", "logits")
    ]
    assert "gathered" not in one and one["parameters"] / 2 < four["gathered"] <= one["parameters"]
    asked = {"target": 256, "to": "yarn", "strategy": "full", "dtype": "float32"}
    whole, half = (plan(str(checkpoint), n, **asked)["stages"]["full"]["optimiser"] for n in (1, 2))
    assert half == pytest.approx(whole / 2, rel=0.01)
    with pytest.raises(OptionError, match="0 devices"):
        plan(str(checkpoint), 0, target=1024)


def test_full_training_counts_every_weight(checkpoint: Path) -> None:
    result = plan(str(checkpoint), target=256, to="yarn", strategy="full", dtype="float32")
    assert result["stages"]["full"]["optimiser"] > 2 * result["stages"]["full"]["parameters"]


def test_what_cannot_fit_is_refused_with_the_setting_that_would(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"target": 4096, "batch_size": 2, "grad_ckpt": False, "steps_warmup": 1, "steps_joint": 1}
    needed = plan(str(checkpoint), **asked)["stages"]["warmup"]["total"]
    monkeypatch.setattr(module, "_device", lambda: ("a small one", needed // 4))
    said = plan(str(checkpoint), **asked)["notes"][0]
    assert "stage warmup needs about" in said and "would fit" in said
    with pytest.raises(OptionError, match="would fit"):
        extend(checkpoint, tmp_path / "run", data=[str(text)], **asked)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(module, "_device", lambda: ("a tiny one", 1000))
    assert "no setting makes it fit" in plan(str(checkpoint), **asked)["notes"][0]


def test_a_mask_is_counted_where_there_is_one(tiny_llama: Callable) -> None:
    model = tiny_llama()
    attach(model, make_spec("adarope", rope_of_model(model), target=512, init="yarn"))
    plain = Settings(512, window=64, plain_skip=True)

    def mask(pieces: int = 1, attn: str = "auto") -> int:
        weighed = Settings(512, window=64, attn=attn)
        return estimate(model, [], weighed, pieces)["total"] - estimate(model, [], plain, pieces)["total"]

    assert mask() == mask(attn="eager") == 64 * 64 * (4 + 1)
    assert mask(pieces=2) == mask(attn="flash_attention_2") == 0


def test_windows_without_the_mask_are_a_cure_where_they_are_enough(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"target": 65_536, "window": 16_384, "strategy": "warmup"}
    plain = plan(str(checkpoint), plain_skip=True, **asked)["stages"]["warmup"]["total"]
    assert plan(str(checkpoint), **asked)["stages"]["warmup"]["total"] > 2 * plain
    monkeypatch.setattr(module, "_device", lambda: ("a small one", plain))
    assert "--plain-skip would fit" in plan(str(checkpoint), **asked)["notes"][0]
    assert plan(str(checkpoint), attn="flash_attention_2", **asked)["notes"] == []
