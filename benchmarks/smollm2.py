"""SmolLM2-135M to 2 and 4 times its window: methods at equal training tokens, by NLL, recall and RULER.

    python benchmarks/smollm2.py --checkpoint SmolLM2 --data train/ --eval-data dev/ --out DIR [--targets 16384 32768]

Every run sees the same position-skip windows of the books, a share of them with facts stated and asked for in the text
(in formats that are neither RULER's nor, but for one, those that recall is measured in). Recall is that of `ropex eval
recall`, all formats, in windows of the target's length: "near" where the answer was last said within the native window,
"far" where before it. What is done is kept in DIR, and an interrupted run goes on where it was. --jobs runs several at
once: so small a model leaves most of a GPU idle.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ropex.convert.inspect import inspect
from ropex.eval.nll import evaluate_nll
from ropex.eval.recall import evaluate_recall
from ropex.eval.ruler import evaluate_ruler
from ropex.train.extend import extend

WARMUP_SHARE = 0.25
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
VARIANTS: dict[str, dict[str, Any]] = {
    "AdaRoPE warmup": {"strategy": "warmup"},
    "warmup, delta at 1e-3": {"strategy": "warmup", "lr_freq": 1e-3},
    "warmup, no AdaFreq": {"strategy": "warmup", "ada_freq": False},
    "AdaRoPE warmup-joint": {"strategy": "warmup-joint"},
    "warmup-joint, delta at 1e-3": {"strategy": "warmup-joint", "lr_freq": 1e-3},
    "warmup-joint, all pairs": {"strategy": "warmup-joint", "all_pairs": True},
    "AdaRoPE joint": {"strategy": "joint"},
    "YaRN lora": {"strategy": "lora", "to": "yarn"},
    "warmup-joint, no AdaFreq": {"strategy": "warmup-joint", "ada_freq": False},
    "warmup-joint, no AdaScale": {"strategy": "warmup-joint", "ada_scale": False},
}
UNTRAINED = ("base", "YaRN")
QUARTERS = 4  # columns of the table for what is beyond the window


def train(name: str, target: int, args: argparse.Namespace) -> Path:
    folder: Path = args.out / "runs" / f"{name} {target} {args.seed}"
    variant = VARIANTS[name]
    warm = round(WARMUP_SHARE * args.steps) if variant["strategy"].startswith("warmup-") else args.steps
    rest = args.steps - warm if variant["strategy"].startswith("warmup-") else args.steps
    extend(
        args.checkpoint, folder, target=target, window=args.window, data=[str(args.data)], dtype=args.dtype,
        seed=args.seed, plain_skip=args.plain_skip, recall_share=args.recall_share, batch_size=args.batch_size,
        steps_warmup=warm, steps_joint=rest, save_steps=10**6, resume=(folder / "run.json").exists(), **variant,
    )  # fmt: skip
    return folder


def measure(name: str, target: int, args: argparse.Namespace) -> dict[str, Any]:
    """{"nll": {"buckets": [..], "mean", "native"}, "recall": a result of evaluate_recall, "ruler": {length: {task:
    percent}}} of one variant."""
    window = inspect(args.checkpoint)["window"]
    if name in VARIANTS:
        checkpoint = str(train(name, target, args))
    else:
        checkpoint = args.checkpoint + ("" if name == "base" else f"@{name.lower()}:{target // window}")
    files = sorted(args.eval_data.glob("*.txt"))
    (nll,) = evaluate_nll(
        [checkpoint], files, [target], dtype=args.dtype, buckets=target // window * QUARTERS, windows=1,
        out=args.out / "nll" / f"{name} {target} {args.seed}",
    )["results"]  # fmt: skip
    native = [b for b in nll["buckets"] if b["end"] <= window]
    inside = sum(b["nll"] * b["tokens"] for b in native) / sum(b["tokens"] for b in native)
    scores: dict[str, dict[str, float]] = {}
    lengths = args.ruler_lengths or [window // 2, window, target]
    if args.samples:
        text = args.out / "essays.txt"
        asked = evaluate_ruler(
            [checkpoint], args.tasks, lengths, args.samples, essays=text, dtype=args.dtype,
            out=args.out / "ruler" / f"{name} {target} {args.seed}",
        )  # fmt: skip
        for row in asked["results"]:
            scores.setdefault(str(row["length"]), {})[row["task"]] = row["score"]
    recalled: dict[str, Any] = {}
    if args.recall:
        (recalled,) = evaluate_recall(
            [checkpoint], [target], windows=args.recall, data=files, dtype=args.dtype,
            out=args.out / "recall" / f"{name} {target} {args.seed}",
        )["results"]  # fmt: skip
    nlls = {"mean": nll["mean"], "native": inside, "buckets": nll["buckets"]}
    return {"nll": nlls, "recall": recalled, "ruler": scores}


def result_file(name: str, target: int, seed: int, out: Path) -> Path:
    return out / f"{name} {target} {seed}.json"


def table(args: argparse.Namespace) -> str:
    """For each target: NLL (mean, inside the window, in each quarter beyond it), recall, and RULER's means."""
    window, parts = inspect(args.checkpoint)["window"], []
    for target in args.targets:
        found = {name: _found(name, target, args) for name in [*UNTRAINED, *VARIANTS]}
        found = {name: results for name, results in found.items() if results}
        lengths = sorted({int(x) for results in found.values() for r in results for x in r["ruler"]})
        edges = [window + (i + 1) * (target - window) // QUARTERS for i in range(QUARTERS)]
        head = [f"NLL to {target:,}", f"0 to {window:,}", *(f"to {e:,}" for e in edges)]
        head += ["NLL around facts", "recall near, log-prob.", "near, %", "far, log-prob.", "far, %"]
        head += [f"RULER {x:,}" for x in lengths]
        lines = [f"| | seeds | {' | '.join(head)} |", "|---" * (2 + len(head)) + "|"]
        for name, results in found.items():
            cells = [f"{statistics.mean(v):.4f}" for v in zip(*(_nlls(r, window) for r in results), strict=True)]
            recalls = [_recalls(r["recall"]) for r in results if r["recall"]]
            for column, digits in enumerate((4, 2, 1, 2, 1)):
                cells.append(f"{statistics.mean(row[column] for row in recalls):.{digits}f}" if recalls else "")
            for length in lengths:
                means = [statistics.mean(r["ruler"][str(length)].values()) for r in results if r["ruler"]]
                cells.append(f"{statistics.mean(means):.1f}" if means else "")
            lines.append(f"| {name} | {len(results)} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
        if target in lengths:
            parts.append(_by_task(target, found))
    return "\n\n".join(parts)


def _found(name: str, target: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    files = [result_file(name, target, seed, args.out) for seed in args.seeds]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _nlls(result: dict[str, Any], window: int) -> list[float]:
    """The mean, that inside the window, and those of each quarter of what is beyond it."""
    beyond = [bucket["nll"] for bucket in result["nll"]["buckets"] if bucket["start"] >= window]
    step = len(beyond) // QUARTERS
    quarters = [statistics.mean(beyond[i : i + step]) for i in range(0, len(beyond), step)]
    return [result["nll"]["mean"], result["nll"]["native"], *quarters]


def _recalls(row: dict[str, Any]) -> list[float]:
    """The NLL of the text, and of near and far answers the log-probability and the percentage right."""
    groups = [value for name in ("near", "far") for value in (row[name]["logprob"], 100 * row[name]["accuracy"])]
    return [row["text"]["nll"], *groups]


def _by_task(target: int, found: dict[str, list[dict[str, Any]]]) -> str:
    """RULER at the target, task by task."""
    scores = {name: [r["ruler"][str(target)] for r in results if r["ruler"]] for name, results in found.items()}
    tasks = list(dict.fromkeys(task for rows in scores.values() for row in rows for task in row))
    lines = [f"| RULER at {target:,} | {' | '.join(tasks)} |", "|---" * (1 + len(tasks)) + "|"]
    for name, rows in scores.items():
        if rows:
            means = [statistics.mean(row[task] for row in rows) for task in tasks]
            lines.append(f"| {name} | {' | '.join(f'{m:.0f}' for m in means)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--eval-data", type=Path, required=True, help="a folder of .txt files, for NLL and as essays")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=300, help="of every run, both stages together")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--plain-skip", action="store_true", help="as the option of `ropex extend`")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--recall-share", type=float, default=0.5, help="as the option of `ropex extend`")
    parser.add_argument("--samples", type=int, default=50, help="of each RULER task and length; 0 for none")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument(
        "--ruler-lengths", type=int, nargs="+", help="[default: half the window, the window, the target]"
    )
    parser.add_argument("--recall", type=int, default=8, help="windows with facts to recall; 0 for none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=[*UNTRAINED, *VARIANTS], default=[*UNTRAINED, *VARIANTS])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "TARGET", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.one:
        name, target, args.seed = args.one[0], int(args.one[1]), int(args.one[2])
        result = json.dumps(measure(name, target, args))
        result_file(name, target, args.seed, args.out).write_text(result)
        return
    wanted = [
        (name, target, seed)
        for seed in args.seeds
        for target in args.targets
        for name in args.only
        if name in VARIANTS or seed == args.seeds[0]
        if not args.table and not result_file(name, target, seed, args.out).exists()
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    if wanted:
        (args.out / "essays.txt").write_text("\n\n".join(f.read_text() for f in sorted(args.eval_data.glob("*.txt"))))

    def run(one: tuple[str, int, int]) -> None:
        command = [sys.executable, *sys.argv, "--one", *map(str, one)]
        with (args.out / f"{' '.join(map(str, one))}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        print(*one, "failed: see its log" if code else "done", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, wanted))
    print(table(args))


if __name__ == "__main__":
    main()
