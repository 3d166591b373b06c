"""Print the README's table for the small checkpoint: loss and needle accuracy by length, rope and YaRN.

python scripts/measure_nano.py --checkpoint demo/nano --text demo/text/dev.txt
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropex.eval.models import encode
from ropex.eval.needle import needle_accuracy
from ropex.eval.nll import cut_windows, token_nll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("demo/nano"))
    parser.add_argument("--text", type=Path, nargs="+", default=[Path("demo/text/dev.txt")])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--samples", type=int, default=100, help="needles at a length")
    parser.add_argument("--factor", type=float, default=8.0, help="of YaRN")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    texts = [file.read_text(encoding="utf-8-sig") for file in args.text]
    documents = [encode(tokenizer, text) for text in texts]
    print("| rotary | length | NLL (nats a token) | NLL, last 64 tokens | needle accuracy |")
    print("|---|---|---|---|---|")
    for name in ("rope", f"yarn x{args.factor:g}"):
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
        if name != "rope":
            config = model.config
            config.rope_parameters = {
                "rope_type": "yarn",
                "rope_theta": config.rope_parameters["rope_theta"],
                "factor": args.factor,
                "original_max_position_embeddings": config.max_position_embeddings,
            }
            model = AutoModelForCausalLM.from_pretrained(args.checkpoint, config=config, dtype=torch.float32)
        for length in args.lengths:
            windows = cut_windows(documents, length, [tokenizer.bos_token_id])
            losses = torch.cat([token_nll(model, part) for part in windows.split(max(1, 8192 // length))])
            needle = needle_accuracy(model, tokenizer, "".join(texts), length, args.samples)
            print(
                f"| {name} | {length} | {losses.mean():.3f} | {losses[:, -64:].mean():.3f} | {needle:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
