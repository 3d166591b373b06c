"""Tokens a second and peak memory of both stages on one GPU, by window and attention.

    python benchmarks/gpu.py --checkpoint Llama-3-8B --data books/ --out DIR [--windows 8192 32768 65536]

Where there is no GPU it runs on the CPU, and says so: give small windows then. Attention that is not installed, and
windows that do not fit, are rows that say so.
"""

import argparse
import json
import platform
import shutil
from pathlib import Path

import torch
from transformers.utils import is_flash_attn_2_available

from ropex.convert.inspect import inspect
from ropex.errors import RopexError
from ropex.train.extend import extend


def measure(args: argparse.Namespace, window: int, attention: str, strategy: str) -> dict[str, float]:
    """Tokens a second over all steps but the first, and GiB at most."""
    run = args.out / f"{strategy}-{window}-{attention}"
    shutil.rmtree(run, ignore_errors=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    target = max(window, 2 * inspect(args.checkpoint)["window"])  # a shorter window skips over it
    extend(
        args.checkpoint, run, target=target, window=window, data=[str(args.data)], strategy=strategy,
        steps_warmup=args.steps,
        steps_joint=args.steps, dtype=args.dtype, attn=attention, grad_ckpt=True, save_steps=10**6,
    )  # fmt: skip
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()][1:]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    return {"tokens": len(lines) * window / sum(line["seconds"] for line in lines), "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="nano")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, nargs="+", default=[8192, 32_768, 65_536])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"the CPU ({platform.machine()}): no GPU"
    print(f"ran on {device}; torch {torch.__version__}; {args.checkpoint} in {args.dtype}, {args.steps} steps each\n")
    print("| window | attention | stage | tokens/s | peak GiB |\n|---|---|---|---|---|", flush=True)
    for window in args.windows:
        for attention in ("flash_attention_2", "sdpa"):
            for stage, strategy in ((1, "warmup"), (2, "joint")):
                row = f"| {window} | {attention} | {stage} |"
                if attention == "flash_attention_2" and not (torch.cuda.is_available() and is_flash_attn_2_available()):
                    print(f"{row} not installed | |", flush=True)
                    continue
                try:
                    found = measure(args, window, attention, strategy)
                    print(f"{row} {found['tokens']:,.0f} | {found['peak']:.2f} |", flush=True)
                except (torch.OutOfMemoryError, RopexError) as error:
                    print(f"{row} {str(error).splitlines()[0][:80]} | |", flush=True)


if __name__ == "__main__":
    main()
