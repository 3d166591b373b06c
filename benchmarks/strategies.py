"""Strategies and ablations on the checkpoint that ships with ropex, 256 to 2,048 tokens, at equal training tokens.

    python benchmarks/strategies.py --out DIR [--seeds 0 1 2] [--steps 60] [--only NAME ...]

Every run sees the demo's documents, and has the rates of the recipe nano. A result is kept in DIR as it comes, so that
a run that was interrupted goes on where it was; the table of what is there is printed at the end (or alone, with
--table).
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from ropex.demo.run import FACTOR, RECIPE, evaluate, write_documents
from ropex.loading import load_tokenizer
from ropex.train.extend import extend
from ropex.train.recipe import read_recipe

TARGET = 256 * FACTOR
WARMUP_SHARE = 0.25
# as many tokens a step, in windows whose positions jump; the documents have facts of their own to recall
SHORT = {"window": 256, "batch_size": 16, "recall_share": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "AdaRoPE warmup": {"strategy": "warmup"},
    "warmup, no AdaFreq": {"strategy": "warmup", "ada_freq": False},
    "warmup, no AdaScale": {"strategy": "warmup", "ada_scale": False},
    "warmup, delta at 1e-3": {"strategy": "warmup", "lr_freq": 1e-3},
    "warmup, delta at 3e-2": {"strategy": "warmup", "lr_freq": 3e-2},
    "AdaRoPE warmup-joint": {"strategy": "warmup-joint"},
    "warmup-joint, delta at 1e-3": {"strategy": "warmup-joint", "lr_freq": 1e-3},
    "AdaRoPE warmup-lora": {"strategy": "warmup-lora"},
    "AdaRoPE joint": {"strategy": "joint"},
    "joint, delta at 1e-3": {"strategy": "joint", "lr_freq": 1e-3},
    "YaRN lora": {"strategy": "lora", "to": "yarn"},
    "warmup-joint, no AdaFreq": {"strategy": "warmup-joint", "ada_freq": False},
    "warmup-joint, no AdaScale": {"strategy": "warmup-joint", "ada_scale": False},
    "warmup-joint, shared heads": {"strategy": "warmup-joint", "share_heads": True},
    "warmup-joint, windows of 256": {"strategy": "warmup-joint", **SHORT},
    "warmup-joint, plain windows of 256": {"strategy": "warmup-joint", **SHORT, "plain_skip": True},
    "RoPE-ID joint": {"strategy": "joint", "to": "rope-id"},
    "RoPE-ID full": {"strategy": "full", "to": "rope-id", "lr_full": 1e-3},
}
UNTRAINED = {"base": "nano", f"YaRN x{FACTOR}": f"nano@yarn:{FACTOR}", f"RoPE-ID x{FACTOR}": f"nano@rope-id:{FACTOR}"}


def train(name: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """One run and what it comes to."""
    folder = out / "runs" / f"{name} {seed}"
    data = out / f"train-{seed}.jsonl"
    if not data.exists():
        write_documents(data, load_tokenizer("nano"), TARGET, seed)
    variant = dict(VARIANTS[name])
    warm = round(WARMUP_SHARE * steps) if variant["strategy"].startswith("warmup-") else steps
    rest = steps - warm if variant["strategy"].startswith("warmup-") else steps
    asked = read_recipe(RECIPE) | {"steps_warmup": warm, "steps_joint": rest} | variant
    extend(asked.pop("source"), folder, data=[str(data)], seed=seed, overwrite=True, **asked)
    return evaluate(str(folder), TARGET)


def table(out: Path, seeds: list[int]) -> str:
    """Mean over seeds, and the largest distance from it: NLL and needles found, by length."""
    lengths = [str(TARGET // FACTOR * times) for times in (1, 2, 4, 8)]
    rows = {name: [json.loads(f.read_text()) for f in _files(out, name, seeds)] for name in [*UNTRAINED, *VARIANTS]}
    tables = []
    for kind, unit, form in (("nll", "NLL", "{:.3f}"), ("needle", "needles", "{:.0%}")):
        lines = [f"| | seeds | {' | '.join(f'{unit} {length}' for length in lengths)} |", "|---" * 6 + "|"]
        for name, found in rows.items():
            if found:
                cells = (_spread([result[kind][length] for result in found], form) for length in lengths)
                lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _files(out: Path, name: str, seeds: list[int]) -> list[Path]:
    return [file for seed in seeds if (file := out / f"{name} {seed}.json").exists()]


def _spread(values: list[float], form: str) -> str:
    mean = statistics.mean(values)
    return form.format(mean) + (f" ±{form.format(max(abs(v - mean) for v in values))}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="of every run, both stages together")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in [] if args.table else args.seeds:
        for name in [*(UNTRAINED if seed == args.seeds[0] else ()), *args.only]:
            file = args.out / f"{name} {seed}.json"
            if not file.exists():
                untrained = name in UNTRAINED
                result = evaluate(UNTRAINED[name], TARGET) if untrained else train(name, seed, args.steps, args.out)
                file.write_text(json.dumps(result))
                print(name, seed, result, flush=True)
    print(table(args.out, args.seeds))


if __name__ == "__main__":
    main()
