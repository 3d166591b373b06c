"""The needle grid: is a pass key found, by how deep it lies and how long the text is?"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropex.errors import OptionError
from ropex.eval.log import Log
from ropex.eval.models import (
    default_bos,
    encode,
    load_model,
    load_tokenizer,
    method_of,
    native_window,
    tokenizer_fingerprint,
    versions,
    weights_fingerprint,
)
from ropex.eval.pieces import hidden_states, in_pieces
from ropex.eval.progress import Progress, silent
from ropex.eval.share import gather, processes
from ropex.haystack import DIGITS, KEYS, Haystack, encode_lines, query, shipped_text, statement, stretch, weave
from ropex.head import scale_logits
from ropex.text import read_all

CELLS, KEY = "needle.jsonl", ("checkpoint", "method", "length", "depth", "fingerprint")


@dataclass(frozen=True)
class Style:
    """How a needle is announced, stated and asked for. {key} is a word, {value} the digits that end the question."""

    intro: str
    needle: str
    question: str
    digits: int


STYLES = {
    "passkey": Style(
        "A pass key is hidden somewhere in this text. Keep it in mind: it is asked for at the end.\n\n",
        "The pass key is {value}. Do not forget it: {value} is the pass key.\n",
        "\n\nThe text is over. What was the pass key? The pass key is {value}",
        5,
    ),
    "lines": Style("", statement("{key}", "{value}"), query("{key}", "{value}").removesuffix("))\n"), DIGITS),
}


def evaluate_needle(
    checkpoints: Sequence[str],
    lengths: Sequence[int],
    *,
    depths: int = 11,
    samples: int = 5,
    style: str = "passkey",
    data: Sequence[str | Path] = (),
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The share of pass keys found at each length and depth, on the same texts for checkpoints of one tokenizer.

    lengths: tokens, answer included. depths: how many, evenly from 0 (the text's start) to 1 (its end). samples: of
    each length and depth. style: "passkey", plain sentences; "lines", the `[[key=value]]` lines that `nano` learned.
    data: text to hide needles in, as ropex.text.sources takes it; a play that ships with ropex otherwise. It is
    repeated as needed. A needle counts as found where greedy decoding would say all its digits.

    With `out`, a folder, cells are kept there as they are done, and a later run of the same takes them from there.
    Returns {"kind", "results": [{"checkpoint", "method", "lengths", "depths", "accuracy" [length][depth], "samples",
    "native_window"}], "settings"}. Errors: OptionError, DataError.
    """
    _check(checkpoints, lengths, depths, samples, style)
    everyone = processes()
    report = progress if progress and everyone.is_main_process else silent
    text = "\n".join(d.text for d in read_all(data)) if data else shipped_text()
    log = Log(out, CELLS, KEY)
    at = [round(i / max(1, depths - 1), 4) for i in range(depths)]
    sizes = sorted(set(lengths))
    total, done, results = len(checkpoints) * len(sizes) * depths, 0, []
    for checkpoint in checkpoints:
        report(f"loading {checkpoint}", done, total)
        model, tokenizer = load_model(checkpoint, dtype), load_tokenizer(checkpoint)
        haystack = encode_lines(tokenizer, text)
        settings = [
            weights_fingerprint(model), str(model.dtype), tokenizer_fingerprint(tokenizer), text, style, samples, seed
        ]  # fmt: skip
        fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
        accuracy: list[list[float]] = []
        for length in sizes:
            accuracy.append([])
            for depth in at:
                report(f"{checkpoint} at {length}", done, total)
                cell: dict[str, Any] = {
                    "checkpoint": checkpoint, "method": method_of(model), "length": length, "depth": depth,
                    "fingerprint": fingerprint,
                }  # fmt: skip
                row = log.get(cell)
                if row is None:
                    mine = range(everyone.process_index, samples, everyone.num_processes)
                    drawn = [make_sample(tokenizer, haystack, length, depth, i, seed, STYLES[style]) for i in mine]
                    row = cell | {"found": sum(gather(sum(found(model, *sample) for sample in drawn)))}
                    log.add(row)
                accuracy[-1].append(row["found"] / samples)
                done += 1
        results.append(
            {
                "checkpoint": checkpoint, "method": method_of(model), "lengths": sizes, "depths": at,
                "accuracy": accuracy, "samples": samples, "native_window": native_window(model),
            }
        )  # fmt: skip
        del model
    report("done", total, total)
    told = {
        "style": style, "seed": seed, "samples": samples, "dtype": str(dtype or "as stored"),
        "text": hashlib.sha256(text.encode()).hexdigest()[:16], "versions": versions(),
    }  # fmt: skip
    table = {"kind": "needle", "results": results, "settings": told}
    log.finish(table)
    return table


@dataclass(frozen=True)
class Planted:
    """ids [T] that end in a question and its answer. asking: positions of the queries that say the answer's tokens, and
    said, those tokens. needle: positions start <= p < end of the needle."""

    ids: list[int]
    asking: list[int]
    said: list[int]
    needle: tuple[int, int]
    depth: float


def make_sample(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    depth: float,
    index: int,
    seed: int = 0,
    style: Style = STYLES["passkey"],
) -> tuple[list[int], list[int]]:
    """(prompt, answer) of exactly `length` tokens together; a pure function of its arguments.

    The needle lies at the line end nearest before `depth` of the text. Errors: OptionError where there is no room.
    """
    rng = random.Random(f"grid {seed} {length} {depth} {index}")
    planted = plant(tokenizer, haystack, length, depth, rng, style, default_bos(tokenizer))
    return planted.ids[: -len(planted.said)], planted.said


def plant(
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    depth: float,
    rng: random.Random,
    style: Style,
    bos: Sequence[int],
) -> Planted:
    """A text of exactly `length` tokens, BOS and answer included, with a needle at the line end nearest before `depth`,
    0 to 1. The haystack is repeated as needed. Errors: OptionError where there is no room."""
    key, value = rng.choice(KEYS), f"{rng.randrange(10**style.digits):0{style.digits}d}"
    intro = encode(tokenizer, style.intro)
    needle = encode(tokenizer, style.needle.format(key=key, value=value))
    asked = encode(tokenizer, style.question.format(key=key, value=value))
    before = encode(tokenizer, style.question.format(key=key, value="").rstrip(" "))
    shared = next((i for i, (a, b) in enumerate(zip(asked, before, strict=False)) if a != b), len(before))
    room = length - len(bos) - len(intro) - len(needle) - len(asked)
    if room < 1:
        raise OptionError(f"{length} tokens leave no room for text around a needle: give {length - room + 1} or more")
    body, places = weave(stretch(_repeated(haystack, room), room, rng), [(depth, needle)])
    start = len(bos) + len(intro) + places[0]
    ids = [*bos, *intro, *body, *asked]
    first = len(ids) - len(asked) + shared
    return Planted(
        ids, list(range(first - 1, len(ids) - 1)), asked[shared:], (start, start + len(needle)), depth
    )  # fmt: skip


@torch.inference_mode()
def found(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    """Would greedy decoding say the whole answer? It does exactly when, with the right tokens before it, each token of
    the answer is the most likely one: a single pass tells."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    head: Any = model.get_output_embeddings()

    def run(piece: int) -> bool:
        kept: list[torch.Tensor] = []
        for start, hidden in hidden_states(model, ids, piece):
            kept.append(hidden[:, max(0, len(prompt) - 1 - start) : ids.shape[1] - 1 - start])
        logits = scale_logits(head(torch.cat(kept, 1)).float(), model)
        return bool((logits.argmax(-1) == ids[:, len(prompt) :]).all())

    return in_pieces(model, ids.shape[1], run)


def _repeated(haystack: Haystack, room: int) -> Haystack:
    """The text as often as `room` tokens need it."""
    times = -(-room // max(1, len(haystack.ids)))
    ends = [end + i * len(haystack.ids) for i in range(times) for end in haystack.ends]
    return Haystack(haystack.ids * times, ends)


def _check(checkpoints: Sequence[str], lengths: Sequence[int], depths: int, samples: int, style: str) -> None:
    if not checkpoints or not lengths:
        raise OptionError("nothing to evaluate: name at least one checkpoint and one length")
    if style not in STYLES:
        raise OptionError(f"unknown style '{style}': choose one of {', '.join(STYLES)}")
    for name, value in (("depths", depths), ("samples", samples)):
        if value < 1:
            raise OptionError(f"{name} is {value}: give 1 or more")
