"""Folders as evaluations leave them, with numbers made up here: two checkpoints, and names that are no markup."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BASE, NASTY = "/models/base", '/runs/_<b>&"$x$"<img src=x onerror=document.title="run">'
CHECKPOINTS = ((BASE, "rope"), (NASTY, "adarope"))
VERSIONS = {"ropex": "0.1.0", "torch": "2.13.0"}
RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip


def nll() -> dict[str, Any]:
    draw = random.Random(0)
    rows = []
    for checkpoint, method in CHECKPOINTS:
        for length in (4096, 16384):
            worse = 0.0 if method == "adarope" else 1.0
            edges = [i * length // 8 for i in range(9)]
            buckets = [
                {
                    "start": a,
                    "end": b,
                    "nll": 3.4 - i * 0.05 + worse * (a >= 8192) * i / 3 + draw.random() / 9,
                    "tokens": b,
                }
                for i, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True))
            ]
            mean = sum(b["nll"] for b in buckets) / 8
            rows.append(
                {
                    "checkpoint": checkpoint, "method": method, "length": length, "mean": mean, "tokens": 10 * length,
                    "interval": [mean - 0.1, mean + 0.1], "perplexity": 2.718281828**mean, "buckets": buckets,
                    "windows": 10, "documents": [{"name": "a", "nll": mean, "tokens": length}], "native_window": 8192,
                    "difference": None if checkpoint == BASE
                    else {"to": BASE, "mean": -0.1234, "interval": [-0.2, -0.05]},
                }
            )  # fmt: skip
    return {"kind": "nll", "results": rows, "settings": {"stride": None, "dtype": "as stored", "versions": VERSIONS}}


def needle() -> dict[str, Any]:
    draw = random.Random(1)
    lengths, depths = [2048, 4096, 8192, 16384], [0.0, 0.25, 0.5, 0.75, 1.0]
    rows = [
        {
            "checkpoint": checkpoint, "method": method, "lengths": lengths, "depths": depths, "samples": 20,
            "native_window": 8192,
            "accuracy": [
                [min(1.0, draw.uniform(0.6, 1.1) * (0.4 if (length, method) == (16384, "rope") else 1)) for _ in depths]
                for length in lengths
            ],
        }
        for checkpoint, method in CHECKPOINTS
    ]  # fmt: skip
    return {"kind": "needle", "results": rows, "settings": {"seed": 0}}


def recall() -> dict[str, Any]:
    draw = random.Random(3)

    def group(most: float) -> dict[str, Any]:
        share, logprob = draw.uniform(0.3, most), -draw.uniform(1, 9)
        return {
            "questions": 96, "accuracy": share, "accuracy_interval": [share - 0.1, share + 0.1],
            "logprob": logprob, "logprob_interval": [logprob - 1, logprob + 1],
        }  # fmt: skip

    rows = []
    for checkpoint, method in CHECKPOINTS:
        for length in (4096, 16384):
            far = length > 8192
            groups = {"near": group(0.9), "far": group(0.5) if far else None}
            nll = 3 + draw.random()
            edges = [0, *(64 << i for i in range(12) if 64 << i < length), length]
            rows.append(
                {
                    "checkpoint": checkpoint, "method": method, "length": length, "windows": 6, **groups,
                    "text": {"nll": nll, "interval": [nll - 0.2, nll + 0.2], "tokens": 5 * length},
                    "formats": {
                        name: {"near": group(0.9), "far": group(0.5) if far else None} for name in ("lines", "quote")
                    },
                    "distances": [{"start": a, "end": b} | group(0.9) for a, b in zip(edges, edges[1:], strict=False)],
                    "difference": None if checkpoint == BASE else {
                        "to": BASE, "text": {"nll": -0.0123, "interval": [-0.02, 0.005], "tokens": 5 * length},
                        "near": group(0.9), "far": group(0.5) if far else None,
                    },
                }
            )  # fmt: skip
    return {"kind": "recall", "results": rows, "settings": {"windows": 6, "border": 8192, "versions": VERSIONS}}


def ruler() -> dict[str, Any]:
    draw = random.Random(2)
    rows, means = [], []
    for checkpoint, method in CHECKPOINTS:
        lengths = []
        for length in (4096, 8192, 16384):
            scores = [
                min(100.0, draw.uniform(40, 130) / (2 if length > 8192 and method == "rope" else 1))
                for _ in RULER_TASKS
            ]
            mean = sum(scores) / len(scores)
            lengths.append({"length": length, "mean": mean, "interval": [mean - 3, mean + 3], "tasks": len(scores)})
            rows += [
                {
                    "checkpoint": checkpoint, "method": method, "length": length, "task": task, "score": score,
                    "interval": [max(0, score - 5), min(100, score + 5)], "samples": 50, "fill": 0.97,
                    "score_whole_numbers": score - 1, "truncated": 0.02, "bos": True,
                }
                for task, score in zip(RULER_TASKS, scores, strict=True)
            ]  # fmt: skip
        effective = max((row["length"] for row in lengths if row["mean"] >= 85.6), default=None)
        means.append({"checkpoint": checkpoint, "method": method, "effective_length": effective, "lengths": lengths})
    not_run = [
        {
            "task": task,
            "length": length,
            "why": "no essays in the cache folder: run `ropex eval ruler --prepare` & <wait>",
        }
        for task in ("niah_single_2", "niah_single_3")
        for length in (4096, 8192)
    ]
    settings = {"samples": 50, "seed": 0, "flavour": "nvidia", "chat_template": False, "data": {}, "versions": VERSIONS}
    return {"kind": "ruler", "results": rows, "means": means, "not_run": not_run, "settings": settings, "note": "A & B"}


def tasks() -> dict[str, Any]:
    rows, means = [], []
    for i, (checkpoint, method) in enumerate(CHECKPOINTS):
        for task, metric, value, main in (
            ("arc_easy", "acc", 0.58, True), ("arc_easy", "acc_norm", 0.52, False), ("hellaswag", "acc", 0.33, False),
            ("hellaswag", "acc_norm", 0.41, True), ("wikitext", "word_perplexity", 23.4, True),
        ):  # fmt: skip
            stderr = 0.0123 if value < 1 else None
            rows.append(
                {
                    "checkpoint": checkpoint, "method": method, "task": task, "metric": metric,
                    "value": value + 0.011 * i, "stderr": stderr, "main": main, "samples": 100,
                }
            )  # fmt: skip
        means.append(
            {
                "checkpoint": checkpoint,
                "method": method,
                "set": "nlu",
                "tasks": 2,
                "of": 7,
                "value": 0.5,
                "stderr": 0.01,
            }
        )
    not_run = [{"task": "piqa", "why": "its data set cannot be reached"}]
    return {"kind": "tasks", "results": rows, "means": means, "not_run": not_run, "settings": {"limit": 100}}


MADE = {"nll": nll, "needle": needle, "recall": recall, "ruler": ruler, "tasks": tasks}


@pytest.fixture
def save() -> Callable[..., Path]:
    """save(folder, content) writes a report.json there."""

    def write(folder: Path, content: dict[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(content), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def contents() -> dict[str, Callable[[], dict[str, Any]]]:
    """A made-up report of each kind, by kind."""
    return MADE


@pytest.fixture
def results(tmp_path: Path, save: Callable[..., Path]) -> Path:
    """A folder with an evaluation of each kind below it, as `ropex eval all` leaves it."""
    for kind, make in MADE.items():
        save(tmp_path / "results" / kind, make())
    return tmp_path / "results"
