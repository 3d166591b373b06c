"""evaluate_heads: what the attention heads of a checkpoint do, on a text, by context length."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ropex.errors import DataError, OptionError
from ropex.eval import pieces
from ropex.eval.grid import STYLES
from ropex.eval.heads.capture import watched
from ropex.eval.heads.classes import CLASSES, Thresholds, classify
from ropex.eval.heads.measures import criteria, growth, mean_cosine, variation
from ropex.eval.heads.planted import Planted, plant
from ropex.eval.heads.record import NeedleRecord, TextRecord
from ropex.eval.heads.rotary import facts, pairing, tables, trained_window
from ropex.eval.models import default_bos, encode, load_model, load_tokenizer, method_of, native_window
from ropex.eval.nll import cut_windows
from ropex.eval.pieces import hidden_states, in_pieces
from ropex.eval.progress import Progress, silent
from ropex.haystack import encode_lines
from ropex.text import read_all

BINS = 16  # of query positions, in the curves by position


def evaluate_heads(
    checkpoint: str,
    data: Sequence[str | Path],
    lengths: Sequence[int],
    *,
    queries: int = 256,
    windows: int = 1,
    needles: int = 4,
    style: str = "passkey",
    thresholds: Thresholds | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures of every query head on `windows` windows of the text at each length, and on `needles` planted needles.

    data: as ropex.text.sources takes it. queries: positions a window at which attention is measured; all of them where
    they are no more. style: of the needles, see ropex.eval.grid.STYLES; with needles = 0 none are planted, and no head
    can be told to retrieve. Memory beyond the forward pass: 32 MiB blocks of logits and, a layer, a few D x D sums.

    Returns what `probe` returns, with "kind", "checkpoint", "method" and "native_window" before it; docs/heads.md
    explains every key. Errors: DataError where the text is too short, OptionError for options that make no sense.
    """
    _check(lengths, queries, windows, needles, style)
    say = progress or silent
    sizes = sorted(set(lengths))
    say(f"loading {checkpoint}", 0, 1)
    model, tokenizer = load_model(checkpoint, dtype), load_tokenizer(checkpoint)
    texts = [document.text for document in read_all(data, "test")]
    tokens, bos = [encode(tokenizer, text) for text in texts], default_bos(tokenizer)
    cut = {size: [w.ids for w in cut_windows(tokens, size, bos, windows)][:windows] for size in sizes}
    if not cut[sizes[-1]]:
        longest = max(map(len, tokens))
        raise DataError(f"no text reaches {sizes[-1]} tokens; the longest has {longest}: ask for shorter lengths")
    haystack = encode_lines(tokenizer, "\n".join(texts))
    planted = {
        size: [plant(tokenizer, haystack, size, (i + 0.5) / needles * 0.9, i, style=style) for i in range(needles)]
        for size in sizes
    }
    found = probe(model, cut, planted, queries=queries, thresholds=thresholds, progress=say)
    about = {"checkpoint": checkpoint, "method": method_of(model), "native_window": native_window(model)}
    return {"kind": "heads"} | about | found


@torch.no_grad()
def probe(
    model: PreTrainedModel,
    texts: dict[int, list[list[int]]],
    planted: dict[int, list[Planted]],
    *,
    queries: int = 256,
    thresholds: Thresholds | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The same for a model and windows of token ids by their length; planted may be empty.

    Returns {"lengths", "queries", "windows", "positions", "distances", "thresholds", "classes", "heads"}.
    """
    say, sizes = progress or silent, sorted(texts)
    thresholds = thresholds or Thresholds()
    pairs, interleaved = pairing(model)
    distances = [0, *(2**i for i in range(sizes[-1].bit_length() + 1))]
    total, done = sum(map(len, texts.values())) + sum(map(len, planted.values())), 0
    records, needles = {}, {}
    for size in sizes:
        edges = torch.tensor(distances) if size == sizes[-1] else None
        records[size] = TextRecord(size, queries, pairs, interleaved, edges)
        needles[size] = NeedleRecord()
        for ids in texts[size]:
            say(f"reading {size:,} tokens", done, total)
            records[size].next_window()
            _read(model, ids, records[size])
            done += 1
        for sample in planted.get(size, []):
            say(f"looking for needles in {size:,} tokens", done, total)
            needles[size].next_sample(sample)
            _read(model, sample.ids, needles[size])
            done += 1
    say("done", total, total)
    theta, window = tables(model), trained_window(model)
    learned = facts(model, sizes)
    heads: list[dict[str, Any]] = []
    for layer in sorted(records[sizes[-1]].clouds):
        described = _layer(records, needles, layer)
        groups = len(described) // len(theta[layer])
        for number, head in enumerate(described):
            head |= {"layer": layer, "head": number, "class": classify(head, thresholds, window)}
            head["criteria"] = criteria(theta[layer][number // groups], window)
            if layer in learned:
                head["adarope"] = learned[layer][number]
            heads.append({key: head[key] for key in _ORDER if key in head})
    classes = Counter(head["class"] for head in heads)
    return {
        "lengths": sizes,
        "queries": queries,
        "windows": {str(size): len(texts[size]) for size in sizes},
        "positions": {"length": sizes[-1], "edges": _edges(sizes[-1])},
        "distances": distances,
        "trained_window": window,
        "thresholds": asdict(thresholds),
        "classes": {name: classes[name] for name in CLASSES},
        "heads": heads,
    }


_ORDER = (
    "layer", "head", "kv_head", "class", "e2", "e2_error", "growth", "sink", "sink_error", "largest", "local",
    "previous", "needle", "by_position", "geometry", "pairs", "criteria", "adarope",
)  # fmt: skip


def _read(model: PreTrainedModel, ids: list[int], record: TextRecord | NeedleRecord) -> None:
    """One pass over a row of tokens, in pieces where it is long; its layers are seen by `record`."""
    row = torch.tensor([ids], device=model.device)
    piece = in_pieces(model, len(ids), lambda piece: piece, pieces.PIECE)  # its retries would record a text twice
    with watched(model, record.see):
        for _ in hidden_states(model, row, piece):
            pass


def _layer(records: dict[int, TextRecord], needles: dict[int, NeedleRecord], layer: int) -> list[dict[str, Any]]:
    """The heads of a layer, as JSON has them but for their class and what their rotary says."""
    sizes = sorted(records)
    last = records[sizes[-1]]
    values = {size: records[size].values(layer) for size in sizes}
    means = {size: {name: value.mean(1).tolist() for name, value in values[size].items()} for size in sizes}
    errors = {size: {n: _error(records[size], values[size][n]) for n in ("e2", "sink")} for size in sizes}
    geometry = {size: _geometry(*records[size].clouds[layer]) for size in sizes}
    found = {size: needles[size].summary(layer) for size in sizes if needles[size].samples}
    curves = {name: _curve(last, values[sizes[-1]][name]) for name in ("sink", "largest")}
    sums = last.pair_sums[layer]
    shares = sums.sum(-1) / sums.sum((-1, -2))[:, None].clamp(min=1e-30)
    spread = variation(shares[:, : last.pairs])
    near = (sums / sums.sum(1, keepdim=True).clamp(min=1e-30)).cpu()
    count = len(shares)
    groups = count // len(last.clouds[layer][3].mean())
    heads: list[dict[str, Any]] = []
    for h in range(count):
        at = {name: {str(s): means[s][name][h] for s in sizes} for name in means[sizes[0]]}
        heads.append(
            {"kv_head": h // groups}
            | at
            | {f"{n}_error": {str(s): errors[s][n][h] for s in sizes} for n in ("e2", "sink")}
            | {
                "growth": growth(sizes, [means[s]["e2"][h] for s in sizes]),
                "by_position": {name: curve[h] for name, curve in curves.items()},
                "geometry": {str(s): {k: [v[h] for v in both] for k, both in geometry[s].items()} for s in sizes},
                "pairs": {
                    "shares": shares[h].tolist(), "variation": float(spread[h]), "by_distance": near[h].T.tolist()
                },
            }
            | ({"needle": {str(s): {k: v[h] for k, v in found[s].items()} for s in found}} if found else {})
        )  # fmt: skip
    return heads


def _error(record: TextRecord, values: Tensor) -> list[float]:
    """Standard error of the means over sampled positions, 0 where none was left out: s/sqrt(n) * sqrt(1 - n/N) with n
    of N positions; that of a simple random sample, which sampling by parts stays below. Of other texts it says
    nothing."""
    n, everyone = values.shape[1], record.windows * record.length
    if n < 2:
        return [0.0] * len(values)
    return (values.std(1) * ((1 - n / everyone) / n) ** 0.5).tolist()


def _geometry(bare_q: Any, q: Any, bare_k: Any, k: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Each measure before and after rotation, by query head; a key head's value stands with all its queries."""

    def keys(values: Tensor) -> list[float]:
        return values.repeat_interleave(len(q.mean()) // len(values), 0).tolist()

    return {
        "q_stable_rank": (bare_q.stable_rank().tolist(), q.stable_rank().tolist()),
        "k_stable_rank": (keys(bare_k.stable_rank()), keys(k.stable_rank())),
        "q_first_singular": (bare_q.first_singular_value().tolist(), q.first_singular_value().tolist()),
        "k_first_singular": (keys(bare_k.first_singular_value()), keys(k.first_singular_value())),
        "mean_cosine": (mean_cosine(bare_q, bare_k).tolist(), mean_cosine(q, k).tolist()),
    }


def _edges(length: int) -> list[int]:
    bins = min(BINS, length)
    return [i * length // bins for i in range(bins + 1)]


def _curve(record: TextRecord, values: Tensor) -> list[list[float | None]]:
    """Means of values [Hq, n] by bins of query positions; None for a bin without a sampled query."""
    edges = torch.tensor(_edges(record.length))
    bins = torch.bucketize(torch.cat(record.positions), edges, right=True) - 1
    columns = [values[:, bins == b] for b in range(len(edges) - 1)]
    means: list[list[float | None]] = [
        column.mean(1).tolist() if column.shape[1] else [None] * len(values) for column in columns
    ]
    return [list(row) for row in zip(*means, strict=True)]


def _check(lengths: Sequence[int], queries: int, windows: int, needles: int, style: str) -> None:
    if not lengths or min(lengths) < 16:
        raise OptionError("heads are told apart on 16 tokens or more: give --lengths such as 1k,4k")
    if style not in STYLES:
        raise OptionError(f"unknown style '{style}': choose one of {', '.join(STYLES)}")
    for name, value, least in (("queries", queries, 1), ("windows", windows, 1), ("needles", needles, 0)):
        if value < least:
            raise OptionError(f"{name} is {value}: give {least} or more")
