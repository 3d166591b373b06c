"""lm-eval, as far as ropex uses it: tasks found and loaded, a model wrapped, tasks run, and its chatter kept away."""

import hashlib
import importlib.util
import io
import json
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropex.errors import OptionError, first_line
from ropex.eval.share import processes

_RESAMPLES = 1000  # for standard errors of what is no mean; those of means are exact
_SEED = 1234  # of the examples before a question, as lm-eval's command line sets it
_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "evaluate", "fsspec", "transformers")


@dataclass(frozen=True)
class Loaded:
    """What a name stands for, with its data. content: as lm-eval's TaskManager.load gives it; documents: that are asked
    about; fingerprint: of the tasks' configurations, of these documents, and of those that examples come from."""

    content: dict[str, Any]
    documents: int
    fingerprint: str

    @property
    def tasks(self) -> dict[str, Any]:
        return dict(self.content["tasks"])


def load_tasks(
    names: Sequence[str], folder: Path | None, limit: int | None, num_fewshot: int | None
) -> tuple[dict[str, Loaded], dict[str, str]]:
    """What lm-eval has under each name (a task, a group or a tag), and why others did not load.

    folder: YAML task files of the user's own, found there and below; they win over lm-eval's of the same name. Data
    sets are fetched here. Raises OptionError for a name that is not known, and without lm-eval.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise OptionError("the tasks are lm-eval's, which is not installed: pip install 'ropex[eval]'")
    loaded: dict[str, Loaded] = {}
    failed: dict[str, str] = {}
    with quiet():
        manager = _manager(names, folder)
        if unknown := [name for name in names if name not in manager.all_tasks]:
            near = get_close_matches(unknown[0], manager.all_tasks, 3)
            hint = f" (near: {', '.join(near)})" if near else ""
            raise OptionError(f"lm-eval has no task, group or tag '{unknown[0]}'{hint}: `lm-eval ls tasks` lists them")
        reachable = True
        for name in names:
            with _offline(not reachable), processes().main_process_first():
                try:
                    loaded[name] = _loaded(manager.load([name]), limit, num_fewshot)
                except Exception as error:  # each data set fails in its own way
                    failed[name] = _told(error)
                    reachable = reachable and not isinstance(error, ConnectionError)
    return loaded, failed


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    loaded: Loaded,
    *,
    max_length: int,
    batch_size: int,
    limit: int | None,
    step: Callable[[float], None],
) -> list[dict[str, Any]]:
    """Ask the model what was loaded: a row for each metric of each task, and of the group if it is one.

    max_length: tokens that an input may have with its answer; longer ones lose their beginnings, and "cut" counts them.
    step: told the share of the answers that is there, after each of them. Processes that `accelerate launch` started
    share the documents, and each gets all the rows.
    Returns [{"task", "metric", "value", "stderr", "samples", "num_fewshot", "cut"}].
    """
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    with quiet():
        if tokenizer.eos_token is None:  # lm-eval ends answers with it: a new text begins with BOS
            tokenizer.eos_token = tokenizer.bos_token
        lm = HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=max_length
        )  # fmt: skip
        everyone = processes()
        if everyone.num_processes > 1:  # lm-eval leaves this to us for a model that is there already
            lm.accelerator = Accelerator(cpu=everyone.device.type == "cpu")
            lm._rank, lm._world_size, lm._device = everyone.process_index, everyone.num_processes, everyone.device
        lm.set_cache_hook(_Counter(list(loaded.tasks.values()), step))
        for task in loaded.tasks.values():
            task.set_fewshot_seed(seed=_SEED)
        random.seed(0)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        found = evaluate(lm, loaded.content, limit=limit, bootstrap_iters=_RESAMPLES, log_samples=False)
        cut = {name: sum(_is_cut(lm, ask) for ask in task.instances) for name, task in loaded.tasks.items()}
        (found,) = broadcast_object_list([found])  # the first process has it
        shares = gather_object([cut])
    cut = {name: sum(share[name] for share in shares) for name in cut}
    rows = []
    for name, metrics in found["results"].items():
        group = loaded.content["groups"].get(name)
        members = [task.task_name for task in group.get_all_tasks()] if group else [name]
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            rows.append(
                {
                    "task": name,
                    "metric": metric if chosen == "none" else f"{metric}, {chosen}",
                    "value": _number(value),
                    "stderr": _number(metrics.get(f"{metric}_stderr,{chosen}")),
                    "samples": sum(found["n-samples"][member]["effective"] for member in members),
                    "num_fewshot": found["n-shot"].get(name),
                    "cut": sum(cut[member] for member in members),
                }
            )
    return rows


class _Counter:
    """Stands where lm-eval keeps answers for later, and counts them instead."""

    def __init__(self, tasks: Sequence[Any], step: Callable[[float], None]) -> None:
        self.tasks, self.step, self.count = tasks, step, 0

    def add_partial(self, kind: str, asked: Any, answer: Any) -> None:
        self.count += 1
        self.step(min(1.0, self.count / sum(len(task.instances) for task in self.tasks)))


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing on stdout, no bars, no log lines: what matters is returned or raised."""
    from tqdm import tqdm

    bar: Any = tqdm
    plain, processes = bar.__init__, os.environ.get("DISABLE_MULTIPROC")
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    bar.__init__ = lambda *args, **words: plain(*args, **words | {"disable": True})
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's: standard errors without a pool of processes
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        bar.__init__ = plain
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        del os.environ["DISABLE_MULTIPROC"]
        if processes is not None:
            os.environ["DISABLE_MULTIPROC"] = processes


def _manager(names: Sequence[str], folder: Path | None) -> Any:
    """lm-eval's index of tasks: of the folder alone where it has them all, since its own thousands take their time."""
    from lm_eval.tasks import TaskManager

    if folder is None:
        return TaskManager()
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder: name one with lm-eval's YAML task files")
    own = TaskManager(include_path=str(folder), include_defaults=False)
    return own if set(names) <= set(own.all_subtasks) else TaskManager(include_path=str(folder))


def _loaded(content: Any, limit: int | None, num_fewshot: int | None) -> Loaded:
    """lm-eval's rules for examples: a task that says 0 keeps it, and one that says nothing has none unless asked."""
    count, digest = 0, hashlib.sha256()
    for name, task in content["tasks"].items():
        stated = task.get_config("num_fewshot")
        if stated is None or (num_fewshot is not None and stated != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        digest.update(json.dumps([name, limit, task.dump_config()], sort_keys=True, default=repr).encode())
        examples = task.fewshot_docs() if task.get_config("num_fewshot") else []
        for doc in chain(islice(task.eval_docs, limit), examples):
            digest.update(json.dumps(doc, sort_keys=True, default=repr).encode())
        count += min(limit or len(task.eval_docs), len(task.eval_docs))
    return Loaded({"groups": {}} | dict(content), count, digest.hexdigest()[:16])


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """Do not try the Hub: where it was out of reach a moment ago, each further try would take half a minute."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if wanted:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _told(error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return (
            f"its data set cannot be reached ({first_line(error)}): run it once where there is network, and the data "
            "stays in the Hub's cache"
        )
    if isinstance(error, ImportError):
        return f"a package is missing: {first_line(error)}"
    return f"it does not load ({type(error).__name__}: {first_line(error)})"


def _is_cut(lm: Any, ask: Any) -> bool:
    """Did the model see less than the whole input? Texts that are scored in windows are not cut."""
    if ask.request_type == "loglikelihood":
        return len(lm.tok_encode("".join(ask.args))) > lm.max_length + 1
    if ask.request_type == "generate_until":
        room = lm.max_length - ask.args[1].get("max_gen_toks", lm.max_gen_toks)
        return len(lm.tok_encode(ask.args[0])) > room
    return False


def _number(value: Any) -> float | None:
    """A finite number, or None for what lm-eval writes where it has none."""
    if isinstance(value, bool | int | float | np.number) and np.isfinite(value):
        return float(value)
    return None
