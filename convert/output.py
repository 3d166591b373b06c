"""Outputs appear whole or not at all: written beside the target, fsynced, renamed."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ropex.config import read_json
from ropex.convert.shards import sha256
from ropex.errors import OutputError

PROVENANCE = "ropex.json"  # in every folder that ropex writes: what made it, and the sign that ropex may replace it


def check_output(out: Path, sources: list[Path], overwrite: bool) -> None:
    """Refuse, before any work, a target that must not be written to."""
    target = out.expanduser().resolve()
    for source in (s.resolve() for s in sources):
        if target == source or target in source.parents or source in target.parents:
            raise OutputError(f"{out} is, holds or lies inside the source {source}: choose another output folder")
    if target == Path.home().resolve() or target == Path("/"):
        raise OutputError(f"{out} is no place for a checkpoint: choose a folder of its own")
    if target.exists() and not target.is_dir():
        raise OutputError(f"{out} is a file: choose a folder")
    if target.exists() and any(target.iterdir()):
        if not (target / PROVENANCE).exists():
            raise OutputError(
                f"{out} exists and was not written by ropex: choose another folder, or remove it yourself"
            )
        if not overwrite:
            raise OutputError(f"{out} exists: choose another folder, or replace it with --overwrite")
        listed = read_json(target / PROVENANCE).get("files", {})
        ours = {PROVENANCE, *(name.partition("/")[0] for name in listed)}
        if odd := sorted(path.name for path in target.iterdir() if path.name not in ours):
            raise OutputError(f"{out} holds {odd[0]}, which ropex did not write: move it, or choose another folder")
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable: choose another output folder")


@contextmanager
def whole_folder(out: Path, sources: list[Path], overwrite: bool, need: int) -> Iterator[Path]:
    """Yield a staging folder beside `out`; on success it becomes `out`, on any failure it is gone.

    need: bytes that the output will take at least, checked against the free space first.
    """
    check_output(out, sources, overwrite)
    target = out.expanduser().resolve()
    staging, old = (target.parent / f".{target.name}.{os.getpid()}.{what}" for what in ("partial", "replaced"))
    made = _missing_parents(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if need > free:
            raise OutputError(f"{out} needs {need / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free: free some space")
        _clear_up(target)
        check_output(out, sources, overwrite)
        staging.mkdir()
        yield staging
        for path in staging.rglob("*"):
            if path.is_file() and path.stat().st_nlink > 1:  # a hard link is the source's file as well
                continue
            if path.is_file():
                path.chmod(0o644)
            sync(path)
        sync(staging)
        if target.exists():
            check_output(out, sources, overwrite)  # another run may have finished meanwhile
            target.rename(old)
        staging.rename(target)
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if old.exists() and not target.exists():  # the last rename failed
            old.rename(target)
        for folder in made:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(f"{out} could not be written ({error.strerror}): free some space") from None
        if isinstance(error, OSError):
            raise OutputError(f"{out} could not be written: {error}") from None
        raise


def _clear_up(target: Path) -> None:
    """Remove what killed runs left beside the target. One killed between its last two renames left the older output
    under another name: it gets its own back."""
    for left in target.parent.glob(f".{target.name}.*"):
        number, _, what = left.name.removeprefix(f".{target.name}.").partition(".")
        if what not in ("partial", "replaced") or not number.isdigit() or _lives(int(number)):
            continue
        if what == "replaced" and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process != os.getpid()


def _missing_parents(folder: Path) -> list[Path]:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    return missing


def sync(path: Path) -> None:
    """fsync a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, command: str, source: str, hashes: dict[str, str | None], **facts: Any) -> None:
    """Write what made an output folder, and size and SHA-256 of every file in it. hashes: those that are known
    already; None for a file that nobody read."""
    packages = ("ropex", "torch", "transformers", "safetensors")
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        known = hashes[name] if name in hashes else sha256(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": known}
    versions = {package: version(package) for package in packages}
    facts = {"command": command, "source": source, **facts, "versions": versions, "files": files}
    write_json(folder / PROVENANCE, facts)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
