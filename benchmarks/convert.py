"""Conversion against `cp -r` of the same folder: wall time and memory, as ratios in one run.

    python benchmarks/convert.py --folder DIR [--gigabytes 4] [--repeats 3]

Makes a synthetic Llama checkpoint of 8 shards (and one of a quarter of the size, for memory) in DIR, then takes turns:
`cp -r`, copying conversions, a permutation of all q and k, --link, inspect. Each is followed by `sync`; medians are
printed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ropex.checkpoint import TensorInfo
from ropex.convert.shards import serialised_header

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, SHARDS = 2048, 8192, 32, 8, 64, 32_000, 8


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """bfloat16 weights, finite, of a Llama as deep as the size asks for."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "input_layernorm.weight": (HIDDEN,), "self_attn.q_proj.weight": (q, HIDDEN),
        "self_attn.k_proj.weight": (kv, HIDDEN), "self_attn.v_proj.weight": (kv, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, q), "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN), "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }  # fmt: skip
    words = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    size = sum(2 * int(np.prod(shape)) for shape in layer.values())
    layers = round((gigabytes * 1e9 - 4 * VOCAB * HIDDEN) / size)
    tensors = words | {"model.norm.weight": (HIDDEN,)}
    tensors |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32).view(np.uint32) >> 16
    block = noise.astype(np.uint16).tobytes()  # the upper halves of float32: bfloat16
    names, weight_map = list(tensors), {}
    for shard in range(SHARDS):
        mine = names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]
        file = folder / f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        at, infos = 0, {}
        for name in mine:
            end = at + 2 * int(np.prod(tensors[name]))
            infos[name] = TensorInfo(file, "BF16", tensors[name], at, end)
            at = end
        with file.open("wb") as out:
            out.write(serialised_header(infos, {"format": "pt"}))
            while at > 0:
                at -= out.write(block[: min(at, len(block))])
        weight_map |= dict.fromkeys(mine, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def timed(command: list[str], out: Path | None) -> tuple[float, float]:
    """(seconds until the disk has it, peak MB of the process) of a command that writes `out`."""
    if out is not None:
        shutil.rmtree(out, ignore_errors=True)
    os.sync()
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    seconds = time.perf_counter() - began
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return seconds, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; needs 3 times the size")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--mergekit", type=Path, help="a mergekit-yaml to time beside (it wants an older transformers)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    big, small, out = args.folder / "big", args.folder / "small", args.folder / "out"
    for path, size in ((big, args.gigabytes), (small, args.gigabytes / 4)):
        shutil.rmtree(path, ignore_errors=True)
        pid = os.fork()  # a child's peak counts what its parent had when it began, so the noise is made elsewhere
        if pid == 0:
            make_checkpoint(path, size)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"{path} could not be made")
    ropex = [str(Path(sys.executable).parent / "ropex")]
    convert = [*ropex, "convert", "-o", str(out)]
    commands = {
        "cp -r": (["cp", "-r", str(big), str(out)], out),
        "convert --to yarn": ([*convert, str(big), "--to", "yarn", "--factor", "2"], out),
        "convert --to adarope": ([*convert, str(big), "--to", "adarope", "--init", "yarn", "--factor", "2"], out),
        "convert --pairing interleaved": ([*convert, str(big), "--pairing", "interleaved"], out),
        "convert --to adarope --link": (
            [*convert, str(big), "--to", "adarope", "--init", "yarn", "--factor", "2", "--link"], out,
        ),
        "convert --to yarn --link": ([*convert, str(big), "--to", "yarn", "--factor", "2", "--link"], out),
        "inspect": ([*ropex, "inspect", str(big)], None),
        "convert --to yarn, a quarter of the size": ([*convert, str(small), "--to", "yarn", "--factor", "2"], out),
        "convert --pairing, a quarter of the size": ([*convert, str(small), "--pairing", "interleaved"], out),
    }  # fmt: skip
    if args.mergekit:
        recipe = args.folder / "passthrough.yml"
        recipe.write_text(f"merge_method: passthrough\nmodels: [{{model: {big}}}]\ndtype: bfloat16\n")
        run = [str(args.mergekit), str(recipe), str(out), "--lazy-unpickle"]
        commands["mergekit passthrough"] = (run, out)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(args.repeats):
        for name, (command, writes) in commands.items():
            measured[name].append(timed(command, writes))
            print(name, *(f"{value:.2f}" for value in measured[name][-1]), file=sys.stderr, flush=True)
    base = statistics.median(seconds for seconds, _ in measured["cp -r"])
    print(f"| {args.gigabytes:g} GB, {SHARDS} shards | seconds | of cp -r | peak MB |\n|---|---|---|---|")
    for name, runs in measured.items():
        seconds, peak = statistics.median(r[0] for r in runs), max(r[1] for r in runs)
        print(f"| {name} | {seconds:.2f} | {seconds / base:.2f} | {peak:.0f} |")
    for path in (big, small, out):
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
