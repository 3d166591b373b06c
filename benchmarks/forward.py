"""AdaRoPE's forward pass against the parent's own, as ratios in one run: prefill and cached decoding.

    python benchmarks/forward.py --checkpoint SmolLM2 [--prefill 2048] [--decode 64] [--repeats 5] [--dtype float32]

The two take turns; the ratio is of medians. Every head of the converted one has frequencies and a scale of its own.
"""

import argparse
import statistics
import time
from typing import Any

import torch

import ropex
from ropex import attach, make_spec
from ropex.seam import rope_of_model, rotaries


def synchronised() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor) -> float:
    began = synchronised()
    model(ids, use_cache=True, logits_to_keep=1)
    return synchronised() - began


@torch.no_grad()
def decode(model: Any, ids: torch.Tensor, tokens: int) -> float:
    out = model(ids, use_cache=True, logits_to_keep=1)
    began = synchronised()
    for _ in range(tokens):
        out = model(out.logits[:, -1:].argmax(-1), cache=out.cache, use_cache=True)
    return synchronised() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="nano")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens")
    parser.add_argument("--decode", type=int, default=64, help="tokens, after a quarter of the prefill")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stock = ropex.load(args.checkpoint, args.dtype, device=device)
    ours = ropex.load(args.checkpoint, args.dtype, device=device)
    rope = rope_of_model(ours)
    attach(ours, make_spec("adarope", rope, init="yarn", factor=2.0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for rotary in rotaries(ours):
            for tensor, size in ((rotary.delta, 0.1), (rotary.tau, 0.1), (rotary.gamma, 0.1)):
                tensor.add_((size * torch.randn(tensor.shape, generator=generator)).to(device))
    ids = torch.randint(3, stock.config.vocab_size, (1, args.prefill), generator=generator).to(device)
    models = {"stock": stock, "adarope": ours}
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in models} for kind in ("prefill", "decode")}
    for repeat in range(args.repeats + 1):
        for name, model in models.items():
            took = prefill(model, ids), decode(model, ids[:, : args.prefill // 4], args.decode)
            if repeat:  # the first warms up
                for kind, value in zip(seconds, took, strict=True):
                    seconds[kind][name].append(value)
    where = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, {args.threads} threads"
    print(f"{args.checkpoint} in {args.dtype} on {where}, attention {ours.config._attn_implementation}\n")
    print("| | stock, s | AdaRoPE, s | ratio |\n|---|---|---|---|")
    for kind, tokens in (("prefill", args.prefill), ("decode", args.decode)):
        a, b = (statistics.median(seconds[kind][name]) for name in models)
        print(f"| {kind} of {tokens} tokens | {a:.3f} | {b:.3f} | {b / a:.3f} |")


if __name__ == "__main__":
    main()
