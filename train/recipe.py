"""Recipes: the arguments of `extend` as a YAML file, checked as a whole before anything loads."""

import types
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ropex.errors import OptionError
from ropex.train import atomic
from ropex.train.settings import Settings, check

_HINTS = get_type_hints(Settings) | {"source": str, "data": list, "params": dict}
_LENGTHS = ("target", "window")
RECIPE = "recipe.yaml"  # in a run: what it was made with


def shipped() -> list[str]:
    """Names of the recipes that come with ropex."""
    return sorted(p.name.removesuffix(".yaml") for p in _folder().iterdir() if p.name.endswith(".yaml"))


def read_recipe(name: str | Path) -> dict[str, Any]:
    """The keyword arguments of `extend` (and `source`) from a YAML file or a shipped recipe's name.

    Every key that is unknown and every value of a wrong type or range is named in one OptionError.
    """
    path = Path(name)
    text = (_folder() / f"{name}.yaml") if not path.suffix and str(name) in shipped() else path
    try:
        content = _yaml(text.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError(
            f"the recipe {name} cannot be read ({reason}): give a .yaml file, or one of {', '.join(shipped())}"
        ) from None
    wrong = []
    recipe: dict[str, Any] = {}
    for key, value in content.items():
        if key not in _HINTS:
            near = get_close_matches(str(key), _HINTS, 1)
            wrong.append(f"{key} is no setting" + (f" (is it {near[0]}?)" if near else ""))
        elif (said := _mistyped(key, value)) is not None:
            wrong.append(said)
        else:
            recipe[key] = length(value) if key in _LENGTHS and isinstance(value, str) else value
    settings = {f.name: recipe[f.name] for f in fields(Settings) if f.name in recipe}
    try:
        check(Settings(**{"target": None, **settings, "plain_skip": False}))  # a flag may give the window it is for
    except OptionError as error:
        wrong.append(str(error))
    if wrong:
        raise OptionError(f"the recipe {name}: {'; '.join(wrong)}")
    return recipe


def length(text: str) -> int:
    """Tokens from '16384' or '16k'."""
    number, unit = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
    return int(number) * unit


def write_recipe(path: Path, recipe: Mapping[str, Any]) -> None:
    """What a run was made with, as a recipe that makes it again."""
    import yaml

    atomic.write_bytes(path, yaml.safe_dump(dict(recipe), sort_keys=False).encode())


def _folder() -> Any:
    return files("ropex.train") / "recipes"


def _yaml(text: str, name: str | Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionError(f"the recipe {name} is no YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise OptionError(f"the recipe {name} holds no settings: write one `key: value` a line")
    return content


def _mistyped(key: str, value: Any) -> str | None:
    """What is wrong with the type of a value, or None."""
    hint = _HINTS[key]
    allowed = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if key in _LENGTHS and isinstance(value, str):
        number = value.removesuffix("k").removesuffix("K")
        return None if number.isdigit() else f"{key} is {value!r}, not a length such as 16384 or 16k"
    if key == "data" and isinstance(value, list) and not all(isinstance(item, str) for item in value):
        return f"data is {value!r}, not a list of files, folders and Hub datasets"
    if isinstance(value, bool) and bool not in allowed:
        return f"{key} is {value!r}, not {_named(allowed)}"
    if isinstance(value, int) and float in allowed:
        return None
    if not isinstance(value, tuple(allowed)):
        return f"{key} is {value!r}, not {_named(allowed)}" + (
            ": write 1.0e-3, since YAML takes 1e-3 for text" if isinstance(value, str) and float in allowed else ""
        )
    return None


def _named(allowed: tuple[Any, ...]) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        list: "a list",
        dict: "a map",
    }
    return " or ".join(names[kind] for kind in allowed if kind in names)
