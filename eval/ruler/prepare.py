"""Fetches the data that some tasks read into the cache folder, from the places that the installed lm-eval names."""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from ropex.errors import DataError, RopexError, first_line
from ropex.eval.progress import Progress, silent
from ropex.eval.ruler.sources import FILES, cache_folder, read_essays, read_hotpot, read_squad
from ropex.eval.ruler.wording import lm_eval_folder

_SECONDS = 60  # without an answer, before a download is given up


def prepare(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Fetch each source that is not in the cache folder yet.

    Returns [{"name", "path", "bytes", "error"}]: `error` says why a source is not there, and is None where it is. A
    file appears whole, read once as a check, or not at all.
    """
    report = progress or silent
    places = data_places()
    jobs: dict[str, tuple[Callable[[str], bytes], Callable[[Path], Any]]] = {
        "essays": (_essays, read_essays),
        "squad": (_download, read_squad),
        "hotpot": (_download, read_hotpot),
    }
    found: list[dict[str, Any]] = []
    for done, (name, (fetch, check)) in enumerate(jobs.items()):
        path, error = cache_folder() / FILES[name], None
        if not path.exists():
            report(f"fetching {places[name]}", done, len(jobs))
            error = _fetch(path, places[name], fetch, check)
        size = path.stat().st_size if path.exists() else None
        found.append({"name": name, "path": str(path), "bytes": size, "error": error})
    report("done", len(jobs), len(jobs))
    return found


def data_places() -> dict[str, str]:
    """Where lm-eval takes them from: the Hub's name of the essays, and the addresses of the two files."""
    folder = lm_eval_folder() / "tasks" / "ruler"
    niah, qa = (ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")) for name in ("prepare_niah", "qa_utils"))
    try:
        essays = next(
            ast.literal_eval(node.args[0])
            for node in ast.walk(niah)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "datasets.load_dataset"
        )
        squad, hotpot = (
            ast.literal_eval(node.args.defaults[0])
            for name in ("read_squad", "read_hotpotqa")
            for node in ast.walk(qa)
            if isinstance(node, ast.FunctionDef) and node.name == name
        )
    except (StopIteration, ValueError, IndexError) as error:
        raise DataError("this lm-eval names its data in a way that ropex does not know: install 0.4.13") from error
    return {"essays": essays, "squad": squad, "hotpot": hotpot}


def _fetch(path: Path, place: str, fetch: Callable[[str], bytes], check: Callable[[Path], Any]) -> str | None:
    """None where the file is there afterwards, else what went wrong."""
    part = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(fetch(place))
        check(part)
        part.replace(path)
    except RopexError as error:
        return f"{place} is not what it was: {error}"
    except Exception as error:  # the network's many kinds, and the disk's
        return f"{place} could not be fetched ({first_line(error)}): fetch it elsewhere and save it as {path}"
    finally:
        part.unlink(missing_ok=True)
    return None


def _download(address: str) -> bytes:
    with urlopen(Request(address, headers={"User-Agent": "ropex"}), timeout=_SECONDS) as answer:
        return bytes(answer.read())


def _essays(name: str) -> bytes:
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar
    from huggingface_hub.constants import ENDPOINT

    _download(f"{ENDPOINT}/api/datasets/{name}")  # without a network this fails at once; the Hub's library tries on
    disable_progress_bar()
    return " ".join(load_dataset(name, split="train")["text"]).encode()
