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


def measure(args: argparse.Namespace, window: int, attention: str) -> dict[str, dict[str, float]]:
    """By stage: tokens a second over all steps but the first, and GiB at most."""
    run = args.out / f"{window}-{attention}"
    shutil.rmtree(run, ignore_errors=True)
    target = max(window, 2 * inspect(args.checkpoint)["window"])  # a shorter window skips over it
    extend(
        args.checkpoint, run, target=target, window=window, data=[str(args.data)], steps_warmup=args.steps,
        steps_joint=args.steps, dtype=args.dtype, attn=attention, grad_ckpt=True, save_steps=10**6,
        plain_skip=window < target,  # flash attention has no other
    )  # fmt: skip
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    shutil.rmtree(run)
    found = {}
    for stage in ("warmup", "joint"):
        timed = [line for line in lines if line["stage"] == stage][1:]
        tokens = len(timed) * window / sum(line["seconds"] for line in timed)
        found[stage] = {"tokens": tokens, "peak": timed[-1].get("peak_bytes", float("nan")) / 2**30}
    return found


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
            row = f"| {window} | {attention} |"
            if attention == "flash_attention_2" and not (torch.cuda.is_available() and is_flash_attn_2_available()):
                print(f"{row} not installed | | |", flush=True)
                continue
            try:
                for stage, found in measure(args, window, attention).items():
                    print(f"{row} {stage} | {found['tokens']:,.0f} | {found['peak']:.2f} |", flush=True)
            except (torch.OutOfMemoryError, RopexError) as error:
                print(f"{row} {str(error).splitlines()[0][:80]} | | |", flush=True)


if __name__ == "__main__":
    main()
