"""evaluate_ruler: every checkpoint, length and task, sample by sample, on disk as they come."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ropex.errors import DataError, OptionError, RopexError
from ropex.eval.log import Log
from ropex.eval.models import load_tokenizer, tokenizer_fingerprint, versions
from ropex.eval.progress import Progress, silent
from ropex.eval.ruler.batches import Backend, Batches, NoRoomError
from ropex.eval.ruler.draft import Task, TooShortError
from ropex.eval.ruler.flavours import get_flavour
from ropex.eval.ruler.generate import Answer, Ask
from ropex.eval.ruler.prompts import LEAST_FILL, Prompter, Sample, make_samples, require_room
from ropex.eval.ruler.score import Metric, score
from ropex.eval.ruler.sources import Sources, find_sources
from ropex.eval.ruler.summary import means, summarise
from ropex.eval.ruler.tasks import get_tasks
from ropex.eval.ruler.vllm import Vllm, check_vllm
from ropex.eval.ruler.wording import load_wording
from ropex.eval.share import gather, processes

ANSWERS = "answers.jsonl"
BACKENDS = ("hf", "vllm")
_KEY = ("checkpoint", "method", "task", "length", "seed", "index", "fingerprint")
_REVISION = 3  # raise when prompts or generation change: answers logged before are then not reused


def evaluate_ruler(
    checkpoints: Sequence[str],
    tasks: Sequence[str] | None,
    lengths: Sequence[int],
    samples: int = 500,
    seed: int = 0,
    *,
    flavour: str = "nvidia",
    essays: str | Path | None = None,
    squad: Path | None = None,
    hotpot: Path | None = None,
    dtype: str | torch.dtype | None = None,
    chat_template: bool = False,
    batch_size: int | None = None,
    backend: str = "hf",
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score the checkpoints on RULER tasks at the given lengths (tokens, answer included).

    tasks: names, or None for all 13; a task whose data is missing is left out and listed under "not_run", and so is one
    of all 13 that a length is too short for. essays: a text, a folder of them, or "pg"; these and squad and hotpot are
    looked for in the cache folder where they are not given. backend: one of BACKENDS. Answers are greedy. With `out`, a
    folder, answers are appended to its answers.jsonl as they come, a later run with the same settings, weights and
    tokenizer takes them from there, and report.json is written at the end.

    Returns {"kind", "results": [{"checkpoint", "method", "length", "task", "score", "samples", "fill", ...}], "means":
    [{"checkpoint", "effective_length", "lengths": [{"length", "mean", "interval", "tasks"}]}], "not_run": [{"task",
    "length", "why"}], "settings"}. `score` is RULER's, in percent; `interval` its 95% interval; `score_whole_numbers`
    does not accept a number inside a longer one; `fill` the mean share of the length that prompt and answer take;
    `truncated` the share of answers that ran into the limit of tokens with something still missing; `bos` whether
    prompts start with it. "note" is added where the checkpoints' tokenizers differ, so that each has prompts sized by
    its own. Raises OptionError, before any model is loaded, for options that make no sense and lengths too short.
    """
    rules, chosen = get_flavour(flavour), get_tasks(tasks)
    _check_options(checkpoints, chosen, lengths, samples, batch_size)
    _check_backend(backend, checkpoints, lengths, batch_size)
    everyone = processes()
    report = progress if progress and everyone.is_main_process else silent
    log = Log(out, ANSWERS, _KEY)
    sources, missing = find_sources({task.needs for task in chosen if task.needs}, essays, squad, hotpot)
    prompters: dict[str, Prompter] = {}  # by tokenizer
    tokenizers: dict[str, str] = {}  # by checkpoint
    for name in dict.fromkeys(checkpoints):
        tokenizer = load_tokenizer(name)
        tokenizers[name] = f"{tokenizer_fingerprint(tokenizer)} {tokenizer.chat_template if chat_template else ''}"
        if tokenizers[name] not in prompters:
            prompters[tokenizers[name]] = Prompter(tokenizer, chat_template, rules, sources)
    cells, not_run = _plan(chosen, lengths, missing, list(prompters.values()), seed, samples, tasks is not None, report)
    total, done = len(tokenizers) * len(cells) * samples, 0
    results: list[dict[str, Any]] = []
    scores: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    notes: list[str] = []
    for checkpoint, prompter in ((name, prompters[kind]) for name, kind in tokenizers.items()):
        report(f"loading {checkpoint}", done, total)
        batches = _open(backend, checkpoint, dtype, prompter.tokenizer, batch_size, max(lengths))
        method = batches.method
        key: dict[str, Any] = {"checkpoint": checkpoint, "method": method, "seed": seed}
        settings = _settings(backend, batches, prompter)
        for task, length in cells:
            key |= {"task": task.name, "length": length, "fingerprint": _fingerprint(settings, task, sources)}
            records, start = [], done
            try:
                for parts in _turns(samples, batches.rows(length), everyone.num_processes):
                    report(f"{checkpoint}: {task.name} at {length}", done, total)
                    mine = parts[everyone.process_index]
                    for record in _shared(partial(_records, mine, task, length, seed, prompter, batches, log, key)):
                        if log.get(record) is None:
                            log.add(record)
                        records.append(record)
                        done += 1
            except (NoRoomError, TooShortError) as error:  # another sample than those looked at may need more
                not_run.append({"task": task.name, "length": length, "why": f"{checkpoint}: {error}"})
                done = start + samples
                continue
            results.append(summarise(records) | {"bos": bool(prompter.bos)})
            if (least := min(record["fill"] for record in records)) < LEAST_FILL:
                notes.append(f"{checkpoint}, {task.name} at {length}: prompts fill as little as {least:.0%} of it.")
            by_task = scores.setdefault((checkpoint, method, length), {})
            by_task[task.name] = [record["score"] for record in records]
        notes += [f"{checkpoint}: {note}" for told in gather(batches.notes) for note in told]
        del batches
    report("done", total, total)
    if not results:
        raise OptionError(not_run[-1]["why"])
    if len(prompters) > 1:
        notes.append("The tokenizers differ: each checkpoint has prompts sized by its own.")
    table: dict[str, Any] = {
        "kind": "ruler",
        "results": results,
        "means": means(scores),
        "not_run": not_run,
        "settings": {
            "samples": samples,
            "seed": seed,
            "flavour": flavour,
            "chat_template": chat_template,
            "backend": backend,
            "dtype": str(dtype or "as stored"),
            "data": sources.digests(),
            "versions": versions("lm_eval", "wonderwords"),
        },
    }
    if notes:
        table["note"] = " ".join(notes)
    log.finish(table)
    return table


def _plan(
    tasks: Sequence[Task],
    lengths: Sequence[int],
    missing: dict[str, str],
    prompters: Sequence[Prompter],
    seed: int,
    samples: int,
    named: bool,
    report: Progress,
) -> tuple[list[tuple[Task, int]], list[dict[str, Any]]]:
    """What will be run, by length, and what will not and why. Tasks asked for by name have to fit."""
    cells: list[tuple[Task, int]] = []
    not_run: list[dict[str, Any]] = []
    total = len(set(lengths)) * len(tasks)
    for length in dict.fromkeys(lengths):
        for task in tasks:
            try:
                if task.needs and task.needs in missing:
                    raise DataError(missing[task.needs])
                _require_room(task, length, prompters, seed, samples)
            except RopexError as error:
                if named and not isinstance(error, DataError):
                    raise
                not_run.append({"task": task.name, "length": length, "why": str(error)})
            else:
                cells.append((task, length))
                report("sizing", len(cells) + len(not_run), total)
    if not cells:
        raise OptionError(f"nothing can be run: {not_run[0]['why']}")
    return cells, not_run


def _require_room(task: Task, length: int, prompters: Sequence[Prompter], seed: int, samples: int) -> None:
    """For every tokenizer; the error is that of the one that wants the most."""
    refusals = []
    for prompter in prompters:
        try:
            require_room(task, length, prompter, seed, samples)
        except TooShortError as error:
            refusals.append(error)
    if refusals:
        raise max(refusals, key=lambda error: error.longer)


def _turns(samples: int, rows: int, processes: int) -> list[list[range]]:
    """Batches of indices, one for each process a turn; the last turn may leave some without."""
    step = rows * processes
    return [
        [range(min(at + i * rows, samples), min(at + (i + 1) * rows, samples)) for i in range(processes)]
        for at in range(0, samples, step)
    ]


def _shared(records: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """This process's records and those of the others; where one finds no room, all say so, and none waits for it."""
    why, mine = None, list[dict[str, Any]]()
    try:
        mine = records()
    except (NoRoomError, TooShortError) as error:
        why = str(error)
    found = gather((mine, why))
    for _, said in found:
        if said:
            raise NoRoomError(said)
    return [record for made, _ in found for record in made]


def _records(
    part: range,
    task: Task,
    length: int,
    seed: int,
    prompter: Prompter,
    batches: Backend,
    log: Log,
    key: dict[str, Any],
) -> list[dict[str, Any]]:
    """The answers of a batch, from the log where it has them all.

    A batch that was cut off is asked again as a whole, so that a resumed run computes what an uninterrupted one does.
    """
    known = [log.get(key | {"index": index}) for index in part]
    if not all(known):
        metric: Metric = task.metric if prompter.flavour.best_reference else "all"
        drawn = make_samples(task, length, prompter, seed, part)
        asks = [Ask(sample.input_ids, sample.references, metric) for sample in drawn]
        answers = batches.answers(asks, length, task.tokens_to_generate)
        for i, (sample, answer) in enumerate(zip(drawn, answers, strict=True)):
            known[i] = known[i] or key | {"index": sample.index} | _record(sample, answer, metric)
    return [record for record in known if record is not None]


def _record(sample: Sample, answer: Answer, metric: Metric) -> dict[str, Any]:
    return {
        "prompt_tokens": len(sample.input_ids),
        "prompt_sha256": hashlib.sha256(sample.text.encode()).hexdigest(),
        "fill": sample.fill,
        **sample.facts,
        "references": sample.references,
        "prediction": answer.text,
        "generated_tokens": answer.tokens,
        "stop": answer.stop,
        "score": score(answer.text, sample.references, metric),
        "score_whole_numbers": score(answer.text, sample.references, metric, whole_numbers=True),
    }


def _open(
    backend: str,
    checkpoint: str,
    dtype: str | torch.dtype | None,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int | None,
    longest: int,
) -> Backend:
    if backend == "vllm":
        return Vllm(checkpoint, dtype, tokenizer, longest)
    return Batches(checkpoint, dtype, tokenizer, batch_size)


def _settings(backend: str, answering: Backend, prompter: Prompter) -> dict[str, Any]:
    """All that answers depend on, but for the task and its data."""
    return {
        "revision": _REVISION,
        "backend": backend,
        "weights": answering.weights,
        "tokenizer": tokenizer_fingerprint(prompter.tokenizer),
        "template": prompter.tokenizer.chat_template if prompter.chat_template else None,
        "flavour": asdict(prompter.flavour),
        "wording": asdict(load_wording(prompter.flavour.nvidia_wording)),
        "dtype": answering.dtype,
    }


def _fingerprint(settings: dict[str, Any], task: Task, sources: Sources) -> str:
    data = sources.digests().get(task.needs) if task.needs else None
    return hashlib.sha256(json.dumps([settings, data], sort_keys=True).encode()).hexdigest()[:16]


def _check_options(
    checkpoints: Sequence[str],
    tasks: Sequence[Task],
    lengths: Sequence[int],
    samples: int,
    batch_size: int | None,
) -> None:
    if not checkpoints or not tasks or not lengths:
        raise OptionError("nothing to evaluate: name at least one checkpoint, one task and one length")
    for name, value in (("number of samples", samples), ("batch size", batch_size)):
        if value is not None and value < 1:
            raise OptionError(f"the {name}, {value}, must be 1 or more")


def _check_backend(backend: str, checkpoints: Sequence[str], lengths: Sequence[int], batch_size: int | None) -> None:
    if backend not in BACKENDS:
        raise OptionError(f"unknown backend {backend!r}: choose from {', '.join(BACKENDS)}")
    if backend == "vllm":
        check_vllm(checkpoints, max(lengths), batch_size)
