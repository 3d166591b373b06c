"""SmolLM2-135M to 2 and 4 times its window: methods at equal training tokens, by NLL and RULER.

    python benchmarks/smollm2.py --checkpoint SmolLM2 --data train/ --eval-data dev/ --out DIR [--targets 16384 32768]

Every run sees the same position-skip windows: half plain text of the books, half with keys stated and asked for in it
(the format of `ropex demo`, which is not RULER's). A result is kept in DIR as it comes, so that a run that was
interrupted goes on where it was. --jobs runs several at once: so small a model leaves most of a GPU idle.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ropex.convert.inspect import inspect
from ropex.eval.needle import Haystack, encode_lines, mixed_document
from ropex.eval.nll import evaluate_nll
from ropex.eval.ruler import evaluate_ruler
from ropex.loading import load_tokenizer
from ropex.train.extend import extend

WARMUP_SHARE = 0.25
PAIRS, ASKS = (4, 8), 3  # keys that a window of text with keys states, and how often each is asked for
SPARE = 64  # tokens that a document is longer than a window, for what decoding and encoding again may change
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
VARIANTS: dict[str, dict[str, Any]] = {
    "AdaRoPE warmup": {"strategy": "warmup"},
    "AdaRoPE warmup-joint": {"strategy": "warmup-joint"},
    "AdaRoPE joint": {"strategy": "joint"},
    "YaRN lora": {"strategy": "lora", "to": "yarn"},
    "warmup-joint, no AdaFreq": {"strategy": "warmup-joint", "ada_freq": False},
    "warmup-joint, no AdaScale": {"strategy": "warmup-joint", "ada_scale": False},
}
UNTRAINED = ("base", "YaRN")


def write_documents(path: Path, books: list[Path], tokenizer: Any, args: argparse.Namespace) -> None:
    """Stretches of a window each as JSON lines, every other one with keys in it."""
    rng = random.Random(f"smollm2 {args.seed}")
    length = args.window + SPARE
    texts: list[Haystack] = [encode_lines(tokenizer, book.read_text("utf-8")) for book in books]
    with path.open("w", encoding="utf-8") as file:
        for index in range(args.documents):
            text = rng.choices(texts, [len(t.ids) for t in texts])[0]
            pairs = rng.randint(*PAIRS) if index % 2 else 0
            ids = mixed_document(tokenizer, text, length, pairs, f"{args.seed} {index}", ASKS).ids
            file.write(json.dumps({"text": tokenizer.decode(ids, skip_special_tokens=True)}) + "\n")


def train(name: str, target: int, args: argparse.Namespace) -> Path:
    data = args.out / f"train-{args.seed}.jsonl"
    folder: Path = args.out / "runs" / f"{name} {target} {args.seed}"
    variant = VARIANTS[name]
    warm = round(WARMUP_SHARE * args.steps) if variant["strategy"].startswith("warmup-") else args.steps
    rest = args.steps - warm if variant["strategy"].startswith("warmup-") else args.steps
    extend(
        args.checkpoint, folder, target=target, window=args.window, data=[str(data)], dtype=args.dtype, seed=args.seed,
        batch_size=args.batch_size, steps_warmup=warm, steps_joint=rest, save_steps=10**6, overwrite=True, **variant,
    )  # fmt: skip
    return folder


def measure(name: str, target: int, args: argparse.Namespace) -> dict[str, Any]:
    """{"nll": {"buckets": [..], "mean", "native"}, "ruler": {length: {task: percent}}} of one variant."""
    window = inspect(args.checkpoint)["window"]
    if name in VARIANTS:
        checkpoint = str(train(name, target, args))
    else:
        checkpoint = args.checkpoint + ("" if name == "base" else f"@{name.lower()}:{target // window}")
    files = sorted(args.eval_data.glob("*.txt"))
    nll = evaluate_nll([checkpoint], files, [target], dtype=args.dtype, buckets=target // window * 4)["results"][0]
    native = [b for b in nll["buckets"] if b["end"] <= window]
    inside = sum(b["nll"] * b["tokens"] for b in native) / sum(b["tokens"] for b in native)
    scores: dict[str, dict[str, float]] = {}
    if args.samples:
        text = args.out / "essays.txt"
        asked = evaluate_ruler(
            [checkpoint], TASKS, [window // 2, window, target], args.samples, essays=text, dtype=args.dtype,
            out=args.out / "ruler" / f"{name} {target} {args.seed}",
        )  # fmt: skip
        for row in asked["results"]:
            scores.setdefault(str(row["length"]), {})[row["task"]] = row["score"]
    return {"nll": {"mean": nll["mean"], "native": inside, "buckets": nll["buckets"]}, "ruler": scores}


def result_file(name: str, target: int, seed: int, out: Path) -> Path:
    return out / f"{name} {target} {seed}.json"


def table(args: argparse.Namespace) -> str:
    """For each target: mean NLL, that inside the native window and in each bucket beyond it, and RULER's means."""
    window, parts = inspect(args.checkpoint)["window"], []
    for target in args.targets:
        edges = [window + i * window // 4 for i in range((target - window) // (window // 4))]
        lengths = [window // 2, window, target] if args.samples else []
        head = ["mean", f"0 to {window:,}", *(f"from {e:,}" for e in edges), *(f"RULER {x:,}" for x in lengths)]
        lines = [f"| to {target:,} | seeds | {' | '.join(head)} |", "|---" * (2 + len(head)) + "|"]
        for name in [*UNTRAINED, *VARIANTS]:
            files = [result_file(name, target, seed, args.out) for seed in args.seeds]
            found = [json.loads(f.read_text()) for f in files if f.exists()]
            if not found:
                continue
            values = [
                [r["nll"]["mean"], r["nll"]["native"]]
                + [b["nll"] for b in r["nll"]["buckets"] if b["start"] >= window]
                + [statistics.mean(r["ruler"][str(x)].values()) for x in lengths]
                for r in found
            ]
            cells = [
                (f"{statistics.mean(v):.1f}" if place >= len(head) - len(lengths) else f"{statistics.mean(v):.4f}")
                for place, v in enumerate(zip(*values, strict=True))
            ]
            lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
        parts.append(_by_task(target, lengths, args))
    return "\n\n".join(parts)


def _by_task(target: int, lengths: list[int], args: argparse.Namespace) -> str:
    """RULER at the target, task by task."""
    lines = [f"| RULER at {target:,} | {' | '.join(TASKS)} |", "|---" * (1 + len(TASKS)) + "|"]
    for name in [*UNTRAINED, *VARIANTS] if lengths else []:
        files = [result_file(name, target, seed, args.out) for seed in args.seeds]
        if found := [json.loads(f.read_text())["ruler"][str(target)] for f in files if f.exists()]:
            means = [statistics.mean(scores[task] for scores in found) for task in TASKS]
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
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--documents", type=int, default=2400)
    parser.add_argument("--samples", type=int, default=50, help="of each RULER task and length; 0 for none")
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
        tokenizer = load_tokenizer(args.checkpoint)
        for args.seed in {seed for _, _, seed in wanted}:
            write_documents(args.out / f"train-{args.seed}.jsonl", sorted(args.data.glob("*.txt")), tokenizer, args)

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
