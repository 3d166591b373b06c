"""The whole job on the checkpoint that ships with ropex: inspect, convert, extend, evaluate, export."""

import json
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ropex.convert.convert import convert
from ropex.convert.export import export
from ropex.convert.output import check_output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE = "nano"
FACTOR = 8
DOCUMENTS, PAIRS, ASKS = 120, (8, 16), 8  # training documents; keys each states, and how often each is asked for
SAMPLES = 50  # needles a length
TEXT_TOKENS = 16384  # of the unseen text, scored at every length


def run_demo(
    out: Path | None = None, *, seed: int = 0, progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """Extend `nano` by a factor of 8 and measure it at 1, 2, 4 and 8 times its window.

    out: a new folder that keeps converted/, run/, exported/ and report.json; without it nothing is kept.
    Returns {"rows": [{"name", "nll": {length: nats a token}, "needle": {length: share found}}], "seconds"} for base,
    yarn, warmup, joint and exported; the last is the exported checkpoint, loaded again.
    """
    if out is None:
        with TemporaryDirectory() as folder:
            return _demo(Path(folder) / "demo", seed, progress or (lambda what, done, total: None))
    check_output(out, [], False)
    return _demo(out, seed, progress or (lambda what, done, total: None))


def _demo(out: Path, seed: int, say: Callable[[str, int, int], None]) -> dict[str, Any]:
    from ropex.loading import load_tokenizer
    from ropex.train.extend import extend
    from ropex.train.recipe import read_recipe

    began, steps, recipe = time.monotonic(), 9, read_recipe(RECIPE)
    source, target = recipe.pop("source"), recipe["target"]
    say("converting to adarope", 0, steps)
    convert(source, out / "converted", "adarope", init="yarn", target=target)
    say("writing training documents", 1, steps)
    data = out / "train.jsonl"
    write_documents(data, load_tokenizer(source), target, seed)
    say("extending, in two stages", 2, steps)
    extend(out / "converted", out / "run", data=[str(data)], seed=seed, **recipe)
    say("exporting", 3, steps)
    export(out / "run", out / "exported", dtype="float32")
    checkpoints = {
        "base": source,
        "yarn": f"{source}@yarn:{FACTOR}",
        "warmup": str(out / "run" / "warmup"),
        "joint": str(out / "run"),
        "exported": str(out / "exported"),
    }
    rows = []
    for done, (name, checkpoint) in enumerate(checkpoints.items(), start=4):
        say(f"evaluating {name}", done, steps)
        rows.append({"name": name} | evaluate(checkpoint, target))
    report = {"rows": rows, "seconds": round(time.monotonic() - began, 1)}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def write_documents(path: Path, tokenizer: "PreTrainedTokenizerBase", length: int, seed: int) -> None:
    """Training documents of `length` tokens as JSON lines: the shipped plays, keys stated and asked for in them."""
    import random

    from ropex.eval.needle import mixed_document
    from ropex.haystack import encode_lines

    haystack = encode_lines(tokenizer, _text("train.txt"))
    rng = random.Random(f"demo {seed}")
    with path.open("w", encoding="utf-8") as file:
        for index in range(DOCUMENTS):
            document = mixed_document(tokenizer, haystack, length, rng.randint(*PAIRS), f"{seed} {index}", ASKS)
            text = tokenizer.decode(document.ids, skip_special_tokens=True)
            file.write(json.dumps({"text": text}) + "\n")


def evaluate(checkpoint: str, target: int) -> dict[str, dict[str, float]]:
    """{"nll": {length: mean}, "needle": {length: accuracy}} on the shipped text that no training saw, in float32."""
    from ropex.eval.needle import needle_accuracy
    from ropex.eval.nll import evaluate_nll
    from ropex.loading import load, load_tokenizer

    lengths = [target // FACTOR * times for times in (1, 2, 4, 8)]
    dev = Path(str(files("ropex.demo"))) / "text" / "dev.txt"
    nll = {}
    for length in lengths:
        report = evaluate_nll([checkpoint], [dev], [length], dtype="float32", windows=TEXT_TOKENS // length)
        nll[str(length)] = report["results"][0]["mean"]
    model, tokenizer = load(checkpoint, dtype="float32"), load_tokenizer(checkpoint)
    return {
        "nll": nll,
        "needle": {
            str(length): needle_accuracy(model, tokenizer, _text("dev.txt"), length, SAMPLES) for length in lengths
        },
    }


def _text(name: str) -> str:
    return (files("ropex.demo") / "text" / name).read_text(encoding="utf-8")
