"""Files and folders that appear whole or not at all, and checkpoints that can tell whether they are whole."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ropex.errors import OutputError

MANIFEST = "manifest.json"
PARTIAL = ".partial"  # where a checkpoint is written before it is renamed into place
PREFIX = "checkpoint-"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A failure to write inside becomes an OutputError that names the place and the way on."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path} cannot be written ({reason}): mend that and continue with --resume") from None


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step: whoever reads it, even after a crash, sees the old content or the new."""
    beside = path.with_name(f".{path.name}.tmp")
    with writing(path):
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file."""
    from safetensors.torch import save

    write_bytes(path, save({k: v.contiguous() for k, v in tensors.items()}, metadata={"format": "pt"}))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def seal(folder: Path) -> None:
    """Write the manifest, a sha256 a file, and flush everything: after this the folder may be renamed into place."""
    digests = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name != MANIFEST):
        digests[path.name] = _digest(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_json(folder / MANIFEST, {"sha256": digests})


def whole(folder: Path) -> bool:
    """True when every file that the manifest names is there with the content it had."""
    try:
        digests = json.loads((folder / MANIFEST).read_text())["sha256"]
        return all(_digest(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def publish(folder: Path, place: Path) -> None:
    """Rename a sealed folder to its place; a damaged one that stands there gives way."""
    if place.exists():
        place.rename(folder.with_name(f"{place.name}.old"))
    folder.rename(place)
    sync_folder(place.parent)


def checkpoints(stage: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints of a stage, newest first, whole or not."""
    found = [(p.name.removeprefix(PREFIX), p) for p in stage.glob(f"{PREFIX}*") if p.is_dir()]
    return sorted(((int(step), p) for step, p in found if step.isdigit()), reverse=True)


def rotate(stage: Path, keep: int) -> None:
    """Keep the newest checkpoints; each older one loses its manifest first, so that half of it never counts."""
    for _, folder in checkpoints(stage)[keep:]:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
