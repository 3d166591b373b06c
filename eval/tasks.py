"""Tasks of lm-evaluation-harness on checkpoints, side by side."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropex.errors import DataError, OptionError, first_line
from ropex.eval.harness import Loaded, load_tasks, run
from ropex.eval.log import Log
from ropex.eval.models import (
    load_model,
    load_tokenizer,
    method_of,
    tokenizer_fingerprint,
    versions,
    weights_fingerprint,
)
from ropex.eval.progress import Progress, silent
from ropex.eval.share import processes

CELLS, KEY = "tasks.jsonl", ("checkpoint", "method", "asked", "fingerprint")
_BATCH = 8

SETS: dict[str, dict[str, str]] = {
    "nlu": {
        "arc_easy": "acc",
        "arc_challenge": "acc_norm",
        "hellaswag": "acc_norm",
        "piqa": "acc",
        "winogrande": "acc",
        "boolq": "acc",
        "openbookqa": "acc_norm",
    },
    "longbench": {
        f"longbench_{name}": "score"
        for name in (
            "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum",
            "multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
        )
    },
}  # fmt: skip
"""Tasks that are asked for by one name, each with its main metric: short questions, and LongBench's English tasks."""


def evaluate_tasks(
    checkpoints: Sequence[str],
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    max_length: int | None = None,
    include_path: Path | None = None,
    dtype: str | torch.dtype | None = None,
    batch_size: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run tasks of lm-eval on the checkpoints, all on the same documents.

    tasks: names that lm-eval knows (tasks, groups, tags), "nlu" and "longbench" for the SETS, and those of YAML files
    in `include_path`. limit: documents a task, the first ones. num_fewshot: worked examples before each question, where
    the task lets itself be told. max_length: tokens that an input may have with its answer, for every checkpoint; by
    default each has the length that it was made or extended for. Longer inputs lose their beginnings, and are counted.
    batch_size is halved where memory runs out. A task whose data cannot be had, or that fails, is left out and listed.

    With `out`, a folder, each checkpoint and task is kept there as it is done, a later run with the same settings,
    weights and documents takes it from there, and report.json is written at the end. Processes that `accelerate launch`
    started share the documents of each task, and all return the same.

    Returns {"kind", "results": [{"checkpoint", "method", "task", "metric", "value", "stderr", "main", "samples",
    "num_fewshot", "cut", "max_length"}], "means": [{"checkpoint", "method", "set", "value", "stderr", "tasks", "of"}],
    "not_run": [{"task", "checkpoint", "why"}], "settings"}. value and stderr are lm-eval's own, None where it has none;
    main: the metric that stands for its task; means: of the main metrics of a set. Raises OptionError for a name that
    is not known and without lm-eval, DataError where nothing could be run.
    """
    _check(checkpoints, tasks, limit=limit, num_fewshot=num_fewshot, max_length=max_length, batch_size=batch_size)
    names = list(dict.fromkeys(name for asked in tasks for name in SETS.get(asked, [asked])))
    everyone = processes()
    report = progress if progress and everyone.is_main_process else silent
    log = Log(out, CELLS, KEY)
    report("loading tasks", 0, len(names))
    loaded, failed = load_tasks(names, include_path, limit, num_fewshot)
    not_run: list[dict[str, Any]] = [{"task": name, "checkpoint": None, "why": why} for name, why in failed.items()]
    results: list[dict[str, Any]] = []
    notes: list[str] = []
    total, done = len(set(checkpoints)) * sum(task.documents for task in loaded.values()), 0
    for checkpoint in dict.fromkeys(checkpoints) if loaded else ():
        report(f"loading {checkpoint}", done, total)
        model, tokenizer = load_model(checkpoint, dtype), load_tokenizer(checkpoint)
        length, rows_at_once = max_length or _window(model), batch_size or _BATCH
        settings = [
            weights_fingerprint(model), tokenizer_fingerprint(tokenizer), str(model.dtype), length, version("lm_eval")
        ]  # fmt: skip
        for name, task in loaded.items():
            key = {"checkpoint": checkpoint, "method": method_of(model), "asked": name}
            key["fingerprint"] = hashlib.sha256(json.dumps([*settings, task.fingerprint]).encode()).hexdigest()[:16]

            def step(
                share: float, what: str = f"{checkpoint}: {name}", at: int = done, of: int = task.documents
            ) -> None:
                report(what, at + int(share * of), total)

            step(0.0)
            cell = log.get(key)
            if cell is None:
                try:
                    rows, fitting = _ask(model, tokenizer, task, length, rows_at_once, limit, step)
                except Exception as error:  # a task's own code, or a limit of lm-eval: the others go on
                    if everyone.num_processes > 1:  # other processes may wait for this one: all have to stop
                        raise
                    why = f"it failed ({type(error).__name__}: {first_line(error)})"
                    not_run.append({"task": name, "checkpoint": checkpoint, "why": why})
                else:
                    cell = key | {"rows": rows}
                    log.add(cell)
                    if fitting < rows_at_once:
                        notes.append(f"{checkpoint}: memory ran out, so {fitting} inputs at a time from {name} on.")
                    rows_at_once = fitting
            if cell is not None:
                results += _rows(cell)
            done += task.documents
        del model
    report("done", total, total)
    if not results:
        raise DataError(f"nothing could be run: {not_run[0]['task']}: {not_run[0]['why']}")
    table: dict[str, Any] = {
        "kind": "tasks",
        "results": results,
        "means": _means(results, [name for name in tasks if name in SETS]),
        "not_run": not_run,
        "settings": {
            "limit": limit,
            "num_fewshot": num_fewshot,
            "max_length": max_length,
            "dtype": str(dtype or "as stored"),
            "versions": versions("lm_eval"),
        },
    }
    if notes := notes + _cut(results):
        table["note"] = " ".join(notes)
    log.finish(table)
    return table


def _ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Loaded,
    length: int,
    rows_at_once: int,
    limit: int | None,
    step: Callable[[float], None],
) -> tuple[list[dict[str, Any]], int]:
    """The rows of one checkpoint and task, and how many inputs at a time were few enough for the memory."""
    while True:
        try:
            rows = run(model, tokenizer, task, max_length=length, batch_size=rows_at_once, limit=limit, step=step)
            return [row | {"max_length": length} for row in rows], rows_at_once
        except torch.OutOfMemoryError:
            if rows_at_once == 1 or processes().num_processes > 1:
                raise
            rows_at_once //= 2
            torch.cuda.empty_cache()


def _cut(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each checkpoint with inputs that did not fit."""
    found = []
    for checkpoint, length in dict.fromkeys((row["checkpoint"], row["max_length"]) for row in results):
        here = [row for row in results if row["checkpoint"] == checkpoint and row["main"] and row["cut"]]
        if here:
            counts = ", ".join(f"{row['task']} ({row['cut']:,})" for row in here)
            found.append(f"{checkpoint}: inputs longer than {length:,} tokens lost their beginnings: {counts}.")
    return found


def _rows(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell's rows with their checkpoint and method. The main one: of the group that was asked for, else of each task;
    its metric that the set names, else lm-eval's first."""
    named = [row["task"] for row in cell["rows"]]
    stands = {cell["asked"]} if cell["asked"] in named else set(named)
    wanted = {task: metric for tasks in SETS.values() for task, metric in tasks.items()}
    rows: list[dict[str, Any]] = []
    for row in cell["rows"]:
        mine = [other["metric"] for other in cell["rows"] if other["task"] == row["task"]]
        best = wanted.get(row["task"])
        main = row["task"] in stands and row["metric"] == (best if best in mine else mine[0])
        rows.append({"checkpoint": cell["checkpoint"], "method": cell["method"], **row, "main": main})
    return rows


def _means(results: Sequence[dict[str, Any]], sets: Sequence[str]) -> list[dict[str, Any]]:
    """The mean over the tasks of each set, with the standard error that theirs give it if they are independent."""
    means = []
    for name in sets:
        for checkpoint, method in dict.fromkeys((row["checkpoint"], row["method"]) for row in results):
            here = [
                row
                for row in results
                if row["main"]
                and row["task"] in SETS[name]
                and (row["checkpoint"], row["method"]) == (checkpoint, method)
                and row["value"] is not None
            ]
            if here:
                errors = [row["stderr"] for row in here]
                means.append(
                    {
                        "checkpoint": checkpoint,
                        "method": method,
                        "set": name,
                        "value": fmean(row["value"] for row in here),
                        "stderr": None if None in errors else math.sqrt(sum(e * e for e in errors)) / len(errors),
                        "tasks": len(here),
                        "of": len(SETS[name]),
                    }
                )
    return means


def _window(model: PreTrainedModel) -> int:
    """Tokens that the checkpoint was made or extended for."""
    spec: Any = getattr(model, "ropex_spec", None)
    stated = int(model.config.get_text_config().max_position_embeddings)
    return max(stated, spec.target) if spec is not None else stated


def _check(checkpoints: Sequence[str], tasks: Sequence[str], **numbers: int | None) -> None:
    if not checkpoints or not tasks:
        raise OptionError("nothing to evaluate: name at least one checkpoint and one task")
    for name, value in numbers.items():
        if value is not None and value < (name != "num_fewshot"):
            raise OptionError(f"{name.replace('_', ' ')} is {value}: give {int(name != 'num_fewshot')} or more")
