"""RULER's synthetic long-context tasks, checkpoints side by side on the same prompts."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from ropex.errors import OptionError
from ropex.eval.models import (
    load_model,
    load_tokenizer,
    method_of,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from ropex.eval.progress import Progress, silent
from ropex.eval.ruler.generate import greedy_answer
from ropex.eval.ruler.log import AnswerLog
from ropex.eval.ruler.prompts import Prompter, Sample, make_sample, require_room
from ropex.eval.ruler.score import score, wilson_interval
from ropex.eval.ruler.tasks import TASKS, Task, get_task
from ropex.eval.ruler.wording import load_wording

__all__ = ["TASKS", "evaluate_ruler"]

_REVISION = 1  # raise when prompts or generation change: answers logged before are then not reused


def evaluate_ruler(
    checkpoints: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int = 20,
    seed: int = 0,
    *,
    dtype: str | torch.dtype | None = None,
    chat_template: bool = False,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score the checkpoints on RULER tasks at the given lengths (tokens, answer included).

    Answers are greedy, one prompt at a time. With `out` each is appended to that JSON-lines file as it
    comes, and a later run with the same settings, weights and tokenizer takes it from there.

    Returns {"results": [{"checkpoint", "method", "length", "task", "score", "samples", "fill", ...}]}:
    `score` is RULER's, in percent; `interval` its 95% interval; `score_whole_numbers` does not accept a
    number inside a longer one; `fill` the mean share of the length that prompt and answer take;
    `truncated` the share of answers that ran into the limit of tokens with something still missing;
    `bos` whether prompts start with it. "note" is added where the checkpoints' tokenizers differ, so that
    each has prompts sized by its own.
    """
    chosen = _check_options(checkpoints, tasks, lengths, samples)
    report = progress or silent
    prompters = {name: Prompter(load_tokenizer(name), chat_template) for name in dict.fromkeys(checkpoints)}
    tokenizers = {name: tokenizer_fingerprint(p.tokenizer) for name, p in prompters.items()}
    for task in chosen:
        for length in lengths:
            for prompter in prompters.values():
                require_room(task, length, prompter, seed)
    log = AnswerLog(out)
    cells = [(length, task) for length in dict.fromkeys(lengths) for task in chosen]
    total, done = len(prompters) * len(cells) * samples, 0
    results: list[dict[str, Any]] = []
    for checkpoint, prompter in prompters.items():
        report(f"loading {checkpoint}", done, total)
        model = load_model(checkpoint, dtype)
        settings = {
            "revision": _REVISION,
            "weights": weights_fingerprint(model),
            "tokenizer": tokenizers[checkpoint],
            "template": prompter.tokenizer.chat_template if chat_template else None,
            "wording": asdict(load_wording()),
            "dtype": str(model.dtype),
        }
        fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        for length, task in cells:
            records = []
            for index in range(samples):
                report(f"{checkpoint}: {task.name} at {length}", done, total)
                key = {
                    "checkpoint": checkpoint,
                    "method": method_of(model),
                    "task": task.name,
                    "length": length,
                    "seed": seed,
                    "index": index,
                    "fingerprint": fingerprint,
                }
                record = log.get(key)
                if record is None:
                    sample = make_sample(task, length, prompter, seed, index)
                    record = key | _answer(model, prompter, task, sample)
                    log.add(record)
                records.append(record)
                done += 1
            results.append(_summarise(records) | {"bos": bool(prompter.bos)})
        del model
    report("done", total, total)
    table: dict[str, Any] = {
        "results": results,
        "settings": {
            "samples": samples,
            "seed": seed,
            "chat_template": chat_template,
            "lm_eval": load_wording().version,
        },
    }
    if len(set(tokenizers.values())) > 1:
        table["note"] = "The tokenizers differ: each checkpoint has prompts sized by its own."
    return table


def _answer(model: PreTrainedModel, prompter: Prompter, task: Task, sample: Sample) -> dict[str, Any]:
    answer = greedy_answer(model, prompter.tokenizer, sample.input_ids, sample.references, task.tokens_to_generate)
    return {
        "prompt_tokens": len(sample.input_ids),
        "prompt_sha256": hashlib.sha256(sample.text.encode()).hexdigest(),
        "fill": sample.fill,
        **sample.facts,
        "references": sample.references,
        "prediction": answer.text,
        "generated_tokens": answer.tokens,
        "stop": answer.stop,
        "score": score(answer.text, sample.references),
        "score_whole_numbers": score(answer.text, sample.references, whole_numbers=True),
    }


def _summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table from the answers of one checkpoint, length and task."""
    mean = fmean(record["score"] for record in records)
    cut_off = [record["stop"] == "limit" and record["score"] < 1 for record in records]
    return {
        **{name: records[0][name] for name in ("checkpoint", "method", "length", "task")},
        "score": _percent(mean),
        "interval": [_percent(bound) for bound in wilson_interval(mean, len(records))],
        "score_whole_numbers": _percent(fmean(record["score_whole_numbers"] for record in records)),
        "samples": len(records),
        "fill": fmean(record["fill"] for record in records),
        "truncated": fmean(cut_off),
    }


def _percent(share: float) -> float:
    return round(100 * share, 6)


def _check_options(
    checkpoints: Sequence[str], tasks: Sequence[str], lengths: Sequence[int], samples: int
) -> list[Task]:
    if not checkpoints or not tasks or not lengths:
        raise OptionError("nothing to evaluate: name at least one checkpoint, one task and one length")
    if samples < 1:
        raise OptionError(f"the number of samples, {samples}, must be 1 or more")
    return [get_task(name) for name in dict.fromkeys(tasks)]
