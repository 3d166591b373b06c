"""Both stages of `extend` against plain transformers.Trainer with PEFT's LoRA on the same model, window and LoRA.

    python benchmarks/train_speed.py --checkpoint SmolLM2 --data books/ --out DIR [--window 16384] [--steps 2]

Each runs in a process of its own: tokens a second over all steps but the first (or the only one), and the peak of the
process's memory on the CPU or of the device's on a GPU. Gradient checkpointing is on in all of them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch


def peak() -> float:
    """MiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def plain(args: argparse.Namespace) -> dict[str, float]:
    """The Trainer as its documentation shows it, with LoRA on q and k."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import ropex
    from ropex.train.documents import tokenise
    from ropex.train.windows import Windows

    model: Any = ropex.load(args.checkpoint, args.dtype)
    tokenizer = ropex.load_tokenizer(args.checkpoint)
    corpus = tokenise([str(args.data)], tokenizer, args.window, model.config.vocab_size)
    windows = Windows(corpus, args.window, args.window, 0, 0, args.steps)
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "k_proj"]))
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not ends:
                ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    settings = TrainingArguments(
        output_dir=str(args.out / "plain"), max_steps=args.steps, per_device_train_batch_size=1, report_to="none",
        gradient_checkpointing=True, save_strategy="no", logging_steps=1, learning_rate=2e-4, disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    Trainer(model, settings, train_dataset=windows, callbacks=[Clock()]).train()
    first = min(1, args.steps - 1)
    return {"tokens": (args.steps - first) * args.window / (ends[-1] - ends[first]), "peak": peak()}


def ours(args: argparse.Namespace, strategy: str) -> dict[str, float]:
    from ropex.train.extend import extend

    run = args.out / strategy
    shutil.rmtree(run, ignore_errors=True)
    extend(
        args.checkpoint, run, target=args.window, data=[str(args.data)], strategy=strategy, steps_warmup=args.steps,
        steps_joint=args.steps, dtype=args.dtype, grad_ckpt=True, save_steps=10**6,
    )  # fmt: skip
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    timed = lines[min(1, args.steps - 1) :]
    return {"tokens": len(timed) * args.window / sum(line["seconds"] for line in timed), "peak": peak()}


KINDS = {"Trainer + PEFT": plain, "stage 2": lambda a: ours(a, "joint"), "stage 1": lambda a: ours(a, "warmup")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kind", choices=list(KINDS), help="one of them alone, as JSON")
    args = parser.parse_args()

    if args.kind:
        print("RESULT", json.dumps(KINDS[args.kind](args)))
        return
    results = {}
    for kind in KINDS:
        run = subprocess.run([sys.executable, *sys.argv, "--kind", kind], capture_output=True, text=True)
        found = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
        if not found:
            sys.exit(f"{kind} failed:\n{run.stderr[-2000:]}")
        results[kind] = json.loads(found[-1].removeprefix("RESULT "))
        print(kind, results[kind], file=sys.stderr, flush=True)
    base = results["Trainer + PEFT"]
    print(f"{args.checkpoint}, windows of {args.window} tokens, {args.dtype}, {args.steps} steps\n")
    print("| | tokens/s | ratio | peak MiB | ratio |\n|---|---|---|---|---|")
    for kind, result in results.items():
        print(
            f"| {kind} | {result['tokens']:,.1f} | {result['tokens'] / base['tokens']:.2f} | {result['peak']:,.0f} | "
            f"{result['peak'] / base['peak']:.2f} |"
        )


if __name__ == "__main__":
    main()
