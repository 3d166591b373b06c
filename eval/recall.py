"""Recall: is what a long window said before said again when it is asked for, by how far back it was?

One pass over a window answers all of its questions: greedy decoding would say an answer exactly when, with the right
tokens before it, each of its tokens is the most likely one. The answer's log-probability tells more than that.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropex.errors import CheckpointError, OptionError
from ropex.eval.log import Log
from ropex.eval.models import (
    default_bos,
    load_model,
    load_tokenizer,
    method_of,
    native_window,
    versions,
    weights_fingerprint,
)
from ropex.eval.nll import check_head, read_long, token_scores
from ropex.eval.progress import Progress, silent
from ropex.eval.share import gather, processes
from ropex.facts import MEASURED, Quiz, check_formats, make_quiz
from ropex.haystack import Haystack, encode_lines, shipped_text, stretch
from ropex.text import Document

CELLS, KEY = "recall.jsonl", ("checkpoint", "method", "length", "window", "fingerprint")
_RESAMPLES = 2000
_SHORTEST = 64  # tokens: where the bins of distance begin


def evaluate_recall(
    checkpoints: Sequence[str],
    lengths: Sequence[int],
    *,
    formats: Sequence[str] = tuple(MEASURED),
    windows: int = 8,
    data: Sequence[str | Path] = (),
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Accuracy and log-probability of answers in windows of each length, and the NLL of the text around them; the same
    windows for every checkpoint.

    lengths: tokens. formats: names of MEASURED, with as many facts each. windows: of each length, each a stretch at
    random of one document; of those that reach the greatest length the first ones are taken in turn. data: as
    ropex.text.sources takes it, a Hub dataset's test split; a play that ships with ropex otherwise. "near" is what was
    last said within the first checkpoint's native window, "far" what was said before.

    With `out`, a folder, windows are kept there as they are done, and a later run of the same takes them from there.

    Returns {"kind", "results": [{"checkpoint", "method", "length", "windows", "text", "near", "far", "formats":
    {name: {"near", "far"}}, "distances", "difference"}], "settings"}. A group of questions is {"questions", "accuracy",
    "accuracy_interval", "logprob", "logprob_interval"}, logprob in nats an answer, or None where there is no question;
    text is {"nll", "interval", "tokens"}; distances are groups with "start" and "end", start <= distance < end;
    difference, from the first checkpoint, is {"to", "text", "near", "far"} of the same shape. Intervals: 95%, windows
    drawn anew, both checkpoints' alike for a difference; None where one window has all. Errors: OptionError, DataError.
    """
    _check(checkpoints, lengths, formats, windows)
    report = progress if progress and processes().is_main_process else silent
    sizes = sorted(set(lengths))
    quizzes = _quizzes(checkpoints, data, sizes, formats, windows, seed)
    log = Log(out, CELLS, KEY)
    border = 0
    total, done, measured = len(checkpoints) * len(sizes) * windows, 0, []
    for checkpoint in checkpoints:
        report(f"loading {checkpoint}", done, total)
        model = load_model(checkpoint, dtype)
        check_head(model, checkpoint, torch.tensor([quizzes[sizes[0]][0].ids[:16]]))
        weights, border = weights_fingerprint(model), border or native_window(model)
        for length in sizes:
            entry = {"checkpoint": checkpoint, "method": method_of(model), "length": length}
            cells: list[dict[str, Any]] = [
                entry | {"window": number, "fingerprint": _fingerprint([weights, str(model.dtype), asdict(quiz)])}
                for number, quiz in enumerate(quizzes[length])
            ]
            left = [cell for cell in cells if log.get(cell) is None]
            done += len(cells) - len(left)
            for start in range(0, len(left), processes().num_processes):
                report(f"{checkpoint} at {length}", done, total)
                mine = left[start + processes().process_index :][:1]  # none, where the others have the last ones
                for row in sum(gather([cell | _answers(model, quizzes[length][cell["window"]]) for cell in mine]), []):
                    log.add(row)
                    done += 1
            measured.append(entry | {"rows": [log.get(cell) for cell in cells]})
        del model
    report("done", total, total)
    first = {entry["length"]: entry for entry in reversed(measured)}
    told = {
        "formats": list(formats), "windows": windows, "seed": seed, "border": border,
        "dtype": str(dtype or "as stored"),
        "text": _fingerprint([quiz.ids for length in sizes for quiz in quizzes[length]]), "versions": versions(),
    }  # fmt: skip
    results = [_summary(entry, first[entry["length"]], formats, border) for entry in measured]
    table = {"kind": "recall", "results": results, "settings": told}
    log.finish(table)
    return table


def _quizzes(
    checkpoints: Sequence[str],
    data: Sequence[str | Path],
    lengths: Sequence[int],
    formats: Sequence[str],
    windows: int,
    seed: int,
) -> dict[int, list[Quiz]]:
    """The windows of each length: the same for all the checkpoints."""
    shipped = [Document("", shipped_text())]
    documents = read_long(data, windows, max(lengths), checkpoints[0]) if data else shipped
    first: dict[int, list[Quiz]] = {}
    for checkpoint in checkpoints:
        tokenizer = load_tokenizer(checkpoint)
        texts, bos = [encode_lines(tokenizer, document.text) for document in documents], default_bos(tokenizer)
        mine = {
            length: [
                window_of(tokenizer, texts[number % len(texts)], length, formats, bos, f"{seed} {number}")
                for number in range(windows)
            ]
            for length in lengths
        }
        first = first or mine
        if mine != first:
            raise OptionError(
                f"{checkpoint} and {checkpoints[0]} tokenise the text differently, so their answers cannot be "
                "compared: evaluate them in separate runs"
            )
    return first


def window_of(
    tokenizer: PreTrainedTokenizerBase,
    text: Haystack,
    length: int,
    formats: Sequence[str],
    bos: Sequence[int],
    seed: str,
) -> Quiz:
    """A window of exactly `length` tokens with facts in a stretch of the text, the same for the same arguments. Errors:
    as make_quiz has them, and DataError where the text is too short."""
    asked = {name: MEASURED[name] for name in formats}
    return make_quiz(tokenizer, partial(stretch, text), length, asked, random.Random(f"quiz {seed} {length}"), bos)


def _answers(model: PreTrainedModel, quiz: Quiz) -> dict[str, Any]:
    """{"text": [nats in all, tokens], "questions": [[format, distance, log-probability, whether right]]}."""
    nll, likely = (scores[0].cpu() for scores in token_scores(model, torch.tensor([quiz.ids], device=model.device)))
    if not torch.isfinite(nll).all():
        raise CheckpointError(f"the loss is not finite at length {len(quiz.ids)}: try another dtype, such as float32")
    text = torch.tensor([place - 1 for place in quiz.text if place])
    asked = []
    for question in quiz.questions:
        at = slice(question.start - 1, question.end - 1)
        asked.append([question.format, question.distance, -float(nll[at].double().sum()), bool(likely[at].all())])
    return {"text": [float(nll[text].double().sum()), len(text)], "questions": asked}


def _summary(entry: dict[str, Any], base: dict[str, Any], formats: Sequence[str], border: int) -> dict[str, Any]:
    """One checkpoint at one length, and how it differs from the first one."""
    rows, length = entry["rows"], entry["length"]

    def groups(name: str | None = None, less: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
        bounds = {"near": (0, border + 1), "far": (border + 1, length)}
        return {group: _group(rows, start, end, name, less) for group, (start, end) in bounds.items()}

    edges = [0, *(_SHORTEST << i for i in range(length.bit_length()) if _SHORTEST << i < length), length]
    difference = None
    if base is not entry:
        difference = {"to": base["checkpoint"], "text": _text(rows, base["rows"]), **groups(less=base["rows"])}
    return {
        "checkpoint": entry["checkpoint"], "method": entry["method"], "length": length, "windows": len(rows),
        "text": _text(rows), **groups(), "formats": {name: groups(name) for name in formats},
        "distances": [
            {"start": start, "end": end} | found
            for start, end in zip(edges, edges[1:], strict=False)
            if (found := _group(rows, start, end))
        ],
        "difference": difference,
    }  # fmt: skip


def _group(
    rows: Sequence[dict[str, Any]],
    start: int,
    end: int,
    name: str | None = None,
    less: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any] | None:
    """The questions at distances start <= d < end, of one format or of all, and by how much answers are above those of
    other rows, `less`."""

    def picked(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
        return [[q for q in row["questions"] if start <= q[1] < end and name in (None, q[0])] for row in rows]

    counts = np.array([len(asked) for asked in picked(rows)], dtype=np.float64)
    if not counts.sum():
        return None
    found: dict[str, Any] = {"questions": int(counts.sum())}
    for what, place in (("accuracy", 3), ("logprob", 2)):
        sums = np.array([sum(q[place] for q in asked) for asked in picked(rows)], dtype=np.float64)
        if less is not None:
            sums -= [sum(q[place] for q in asked) for asked in picked(less)]
        found |= {what: float(sums.sum() / counts.sum()), f"{what}_interval": _interval(sums, counts)}
    return found


def _text(rows: Sequence[dict[str, Any]], less: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    """NLL of the text between the facts, or by how much it is above that of other rows."""
    sums, counts = (np.array([row["text"][i] for row in rows], dtype=np.float64) for i in (0, 1))
    if less is not None:
        sums -= [row["text"][0] for row in less]
    return {"nll": float(sums.sum() / counts.sum()), "interval": _interval(sums, counts), "tokens": int(counts.sum())}


def _interval(sums: np.ndarray, counts: np.ndarray) -> list[float] | None:
    """95% percentile bootstrap over windows of a mean, from each window's sum and count. Fixed seed."""
    if np.count_nonzero(counts) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(sums), size=(_RESAMPLES, len(sums)))
    many = counts[drawn].sum(1)
    low, high = np.percentile(sums[drawn].sum(1)[many > 0] / many[many > 0], [2.5, 97.5])
    return [float(low), float(high)]


def _fingerprint(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _check(checkpoints: Sequence[str], lengths: Sequence[int], formats: Sequence[str], windows: int) -> None:
    if not checkpoints or not lengths:
        raise OptionError("nothing to evaluate: name at least one checkpoint and one length")
    check_formats(formats)
    if windows < 1:
        raise OptionError(f"windows is {windows}: give 1 or more")
