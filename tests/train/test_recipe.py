from pathlib import Path
from typing import Any

import pytest
import yaml

from ropex.errors import OptionError
from ropex.train.extend import extend
from ropex.train.recipe import read_recipe, shipped
from ropex.train.settings import Settings

CPU = ("nano", "smollm2-135m-16k")


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_is_valid_and_says_what_it_is_for(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe["target"] >= 2048 and recipe["strategy"] == "warmup-joint"
    Settings(**{k: v for k, v in recipe.items() if k not in ("source", "data", "params")})


def test_four_are_shipped() -> None:
    assert set(shipped()) == {*CPU, "llama3-8b-64k", "llama3-8b-64k-multi-node"}


@pytest.mark.parametrize("name", CPU)
def test_the_cpu_recipes_run(name: str, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """On a tiny model, with their own rates, strategy and window shapes, for a few steps."""
    recipe = read_recipe(name) | {"steps_warmup": 2, "steps_joint": 2, "target": 512}
    recipe.pop("source", None)
    if "window" in recipe:
        recipe["window"] = 128
    result = extend(checkpoint, tmp_path / "run", data=[str(text)], **recipe)
    assert result["finished"] and set(result["stages"]) == {"warmup", "joint"}


def test_a_run_keeps_a_recipe_that_makes_it_again(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    first = extend(
        checkpoint, tmp_path / "a", target=256, window=64, data=[str(text)], steps_warmup=2, steps_joint=2, seed=5
    )
    recipe = read_recipe(tmp_path / "a" / "recipe.yaml")
    assert recipe["seed"] == 5 and recipe["target"] == 256 and recipe["source"] == str(checkpoint)
    again = extend(recipe.pop("source"), tmp_path / "b", **recipe)
    assert again["settings"] == first["settings"]
    for stage in ("warmup", "joint"):
        assert again["stages"][stage]["loss_last"] == first["stages"][stage]["loss_last"]


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    wrong = {"tarjet": "16k", "steps_warmup": "many", "lr_freq": "1e-3", "share_heads": 1, "data": [1], "lora_r": 0}
    path.write_text(yaml.safe_dump(wrong) + "window: 16q\nstrategy: backwards\n")
    with pytest.raises(OptionError) as raised:
        read_recipe(path)
    said = str(raised.value)
    for part in (
        "tarjet is no setting (is it target?)", "steps_warmup is 'many', not a whole number", "write 1.0e-3",
        "share_heads is 1, not true or false", "data is [1]", "window is '16q', not a length",
        "unknown strategy 'backwards'",
    ):  # fmt: skip
        assert part in said


@pytest.mark.parametrize(
    ("content", "message"),
    [("- a\n- b\n", "holds no settings"), ("a: [", "is no YAML"), (None, "cannot be read .*nano")],
)
def test_what_is_no_recipe_is_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "r.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match=message) as raised:
        read_recipe(path)
    assert "\n" not in str(raised.value)
