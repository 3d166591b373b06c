"""ropex's RULER against lm-eval's: making the prompts, and answering the same ones, as ratios in one run.

    python benchmarks/eval.py data --checkpoint SmolLM2 [--lengths 4096 16384 65536] [--samples 20]
    python benchmarks/eval.py speed --checkpoint SmolLM2 [--length 4096] [--samples 4]

data: each tool through its own public path, in a process of its own; lm-eval makes 500 samples however few are asked
for. nltk's sentence splitter, whose data lm-eval downloads, is replaced by a split at full stops. speed: greedy answers
to the same prompts and their scores, by ropex and by lm-eval's `hf` model, in turns.
"""

import argparse
import contextlib
import io
import re
import subprocess
import sys
import time
from typing import Any

MAKERS = {
    "niah_single_1": ("niah_utils", "niah_single_1"),
    "niah_multikey_2": ("niah_utils", "niah_multikey_2"),
    "niah_multikey_3": ("niah_utils", "niah_multikey_3"),
    "vt": ("vt_utils", "get_vt_dataset"),
    "cwe": ("cwe_utils", "get_cw_dataset"),
    "fwe": ("fwe_utils", "fwe_download"),
}
"""Tasks that need no download, and lm-eval's functions that make them."""


def make_theirs(checkpoint: str, task: str, length: int) -> tuple[int, float]:
    """Samples that lm-eval made, and seconds."""
    from importlib import import_module

    import nltk
    import nltk.data

    nltk.data.find = lambda *args, **kwargs: None
    nltk.sent_tokenize = lambda text: re.split(r"(?<=[.!?]) ", text)
    module, name = MAKERS[task]
    make = getattr(import_module(f"lm_eval.tasks.ruler.{module}"), name)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made = make(max_seq_lengths=[length], tokenizer=checkpoint)
    return len(made["test"]), time.perf_counter() - began


def make_ours(checkpoint: str, task: str, length: int, samples: int) -> tuple[int, float]:
    from transformers import AutoTokenizer

    from ropex.eval.ruler.prompts import Prompter, make_samples
    from ropex.eval.ruler.tasks import TASKS

    began = time.perf_counter()
    prompter = Prompter(AutoTokenizer.from_pretrained(checkpoint))
    made = make_samples(TASKS[task], length, prompter, 0, range(samples))
    return len(made), time.perf_counter() - began


def data(args: argparse.Namespace) -> None:
    """The table of seconds."""
    if args.one:
        tool, task, length, samples = args.one[0], args.one[1], int(args.one[2]), int(args.one[3])
        made = make_theirs(args.checkpoint, task, length) if tool == "lm-eval" else make_ours(
            args.checkpoint, task, length, samples
        )  # fmt: skip
        print("RESULT", *made)
        return

    def seconds(tool: str, task: str, length: int, samples: int) -> float:
        command = [sys.executable, *sys.argv, "--one", tool, task, str(length), str(samples)]
        run = subprocess.run(command, capture_output=True, text=True)
        found = [line.split() for line in run.stdout.splitlines() if line.startswith("RESULT ")]
        if not found:
            sys.exit(f"{tool} {task} {length} failed:\n{run.stderr[-2000:]}")
        return float(found[-1][2])

    print(f"| task | length | lm-eval, 500 samples, s | ropex, 500, s | ratio | ropex, {args.samples}, s | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for length in args.lengths:
        for task in args.tasks:
            theirs, few = seconds("lm-eval", task, length, 500), seconds("ropex", task, length, args.samples)
            row = f"| {task} | {length:,} | {theirs:.1f} |"
            if length == min(args.lengths):
                all_ = seconds("ropex", task, length, 500)
                row += f" {all_:.1f} | {theirs / all_:.1f} |"
            else:
                row += " | |"
            print(f"{row} {few:.2f} | {theirs / few:.0f} |", flush=True)


def speed(args: argparse.Namespace) -> None:
    """The table of samples a second."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from ropex.eval.models import load_model, load_tokenizer
    from ropex.eval.ruler.generate import Ask, greedy_answers
    from ropex.eval.ruler.prompts import Prompter, make_samples
    from ropex.eval.ruler.score import score
    from ropex.eval.ruler.tasks import TASKS

    model: Any = load_model(args.checkpoint, args.dtype)
    tokenizer = load_tokenizer(args.checkpoint)
    if tokenizer.eos_token is None:  # lm-eval cannot do without one
        tokenizer.eos_token = tokenizer.bos_token
    harness = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1, max_length=args.length)
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"the CPU, {torch.get_num_threads()} threads"
    )
    print(f"{args.checkpoint} in {model.dtype} on {device}, prompts of {args.length:,} tokens\n")
    print("| task | samples | lm-eval hf, samples/s | ropex | ratio | score of lm-eval | of ropex |")
    print("|---|---|---|---|---|---|---|")
    for name in args.tasks:
        task, prompter = TASKS[name], Prompter(tokenizer)
        drawn = make_samples(task, args.length, prompter, 0, range(args.samples))
        limit = task.tokens_to_generate
        settings = {"until": [], "max_gen_toks": limit, "do_sample": False}
        asked = [
            Instance("generate_until", {}, (sample.text, settings), i, (name, i, 1)) for i, sample in enumerate(drawn)
        ]
        began = time.perf_counter()
        theirs = harness.generate_until(asked, disable_tqdm=True)
        between = time.perf_counter()
        asks = [Ask(sample.input_ids, sample.references) for sample in drawn]
        ours = [answer.text for answer in greedy_answers(model, tokenizer, asks, limit)]
        ended = time.perf_counter()
        rates = len(drawn) / (between - began), len(drawn) / (ended - between)
        scores = [
            100 * sum(score(text, sample.references) for text, sample in zip(texts, drawn, strict=True)) / len(drawn)
            for texts in (theirs, ours)
        ]
        cells = f"{rates[0]:.3f} | {rates[1]:.3f} | {rates[1] / rates[0]:.2f} | {scores[0]:.1f} | {scores[1]:.1f}"
        print(f"| {name} | {len(drawn)} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    made = kinds.add_parser("data")
    made.add_argument("--checkpoint", required=True, help="a folder with a tokenizer")
    made.add_argument("--lengths", type=int, nargs="+", default=[4096, 16_384, 65_536])
    made.add_argument("--tasks", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    made.add_argument("--samples", type=int, default=20)
    made.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    made.set_defaults(run=data)
    answered = kinds.add_parser("speed")
    answered.add_argument("--checkpoint", required=True)
    answered.add_argument("--length", type=int, default=4096)
    answered.add_argument("--tasks", nargs="+", default=["niah_single_1", "vt"])
    answered.add_argument("--samples", type=int, default=4)
    answered.add_argument("--dtype", default="float32")
    answered.set_defaults(run=speed)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
