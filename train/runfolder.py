"""The folder of a run: where it may lie, what is in it, and how far it got.

run.json, trained.safetensors (when finished), log.jsonl, and a folder a stage: the same two files once the stage is
done, so that it loads as a run of its own, and the checkpoint-N folders to resume from.
"""

import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ropex.checkpoint import RUN, TRAINED, is_run, locate
from ropex.config import read_json
from ropex.errors import OutputError
from ropex.train import atomic
from ropex.train.recipe import RECIPE
from ropex.train.report import size
from ropex.train.stages import STRATEGIES, Stage

LOG = "log.jsonl"
NLL, PLOT = "nll.json", "nll.png"  # before and after, where they were compared
_STAGE_NAMES = {stage.name for stages in STRATEGIES.values() for stage in stages}


def source_name(src: str | Path) -> str:
    """What run.json calls the source: `nano`, or its absolute path. Links stay: a cache's file may have its suffix
    only on the link."""
    found = locate(src)
    return str(src) if str(src) == "nano" and not Path(src).exists() else str(found.absolute())


def check_place(place: Path, source: str, resume: bool, overwrite: bool) -> None:
    """May a run be written here? Raises OutputError, and touches nothing."""
    if place.is_file():
        raise OutputError(f"{place} is a file: give a folder")
    inside = locate(source).resolve()
    if inside.is_relative_to(place.resolve()) or place.resolve() in (Path.home(), Path("/")):
        raise OutputError(f"{place} holds the source or more than a run: give another output folder")
    parent = next(p for p in place.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is no folder that can be written to: give another output folder")
    if not place.exists() or not any(place.iterdir()):
        return
    if resume or overwrite:
        if not is_run(place):
            raise OutputError(f"{place} is not a run of `ropex extend`: give another output folder")
        if overwrite and (odd := [p.name for p in place.iterdir() if not _ours(p)]):
            raise OutputError(f"{place} holds {odd[0]}, which is not of a run: move it, or give another output folder")
        return
    raise OutputError(f"{place} exists: continue it with --resume, replace it with --overwrite, or give another folder")


def _ours(path: Path) -> bool:
    return path.name in {RUN, TRAINED, LOG, RECIPE, NLL, PLOT, *_STAGE_NAMES} or path.name.endswith(".tmp")


def check_space(place: Path, needed: int) -> None:
    """Is there room for what the run will write (bytes)?"""
    parent = next(p for p in place.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OutputError(f"{parent} has {size(free)} free and the run needs {size(needed)}: free some space")


def create(place: Path, run: dict[str, Any]) -> None:
    """Make the folder with its run.json in it, in one step; an older run there is deleted once the new one stands."""
    beside, old = (place.with_name(f".{place.name}.{what}") for what in ("tmp", "old"))
    with atomic.writing(place):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        atomic.write_json(beside / RUN, run)
        if is_run(place):
            place.rename(old)
        beside.replace(place)
        atomic.sync_folder(place.parent)
        shutil.rmtree(old, ignore_errors=True)


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("ropex", "torch", "transformers", "peft")}


def read_run(place: Path) -> dict[str, Any] | None:
    return read_json(place / RUN) if is_run(place) else None


def finished(place: Path) -> bool:
    """True when trained.safetensors is there: it is written last, and whole."""
    return (place / TRAINED).is_file()


def write_trained(folder: Path, run: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """A folder that ropex.load takes."""
    atomic.write_json(folder / RUN, run)
    atomic.write_tensors(folder / TRAINED, state)


def read_trained(folder: Path, say: Callable[[str], None]) -> dict[str, torch.Tensor] | None:
    """What a finished stage trained, or None where it did not finish; a damaged file counts as that."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not finished(folder):
        return None
    try:
        return load_file(folder / TRAINED)
    except (OSError, SafetensorError):
        say(f"{folder / TRAINED} is damaged: the stage is taken up from its checkpoints")
        return None


def newest_whole(stage: Path, say: Callable[[str], None]) -> tuple[int, Path] | None:
    """(step, folder) of the newest checkpoint whose content is what was written; damaged ones are skipped aloud."""
    for step, folder in atomic.checkpoints(stage):
        if atomic.whole(folder):
            return step, folder
        say(f"{folder} is damaged and skipped")
    return None


def append_log(place: Path, line: dict[str, Any]) -> None:
    with atomic.writing(place / LOG), (place / LOG).open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def read_log(place: Path) -> list[dict[str, Any]]:
    """Every whole line; a kill can leave half of the last one."""
    lines = []
    if (place / LOG).exists():
        for text in (place / LOG).read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def rewind_log(place: Path, stage: Stage, step: int, earlier: list[str]) -> None:
    """Drop the lines of steps that will be made again: those after `step` of `stage`."""
    kept = [
        line for line in read_log(place)
        if line["stage"] in earlier or (line["stage"] == stage.name and line["step"] <= step)
    ]  # fmt: skip
    atomic.write_bytes(place / LOG, "".join(json.dumps(line) + "\n" for line in kept).encode())
