"""Loss by position: how well a checkpoint predicts the tokens of whole windows, early and late in the window.

`nll` is the negative log-likelihood of a token given all that stands before it in its window, in nats.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropex.errors import CheckpointError, DataError, OptionError, UnsupportedError
from ropex.eval.log import Log
from ropex.eval.models import (
    default_bos,
    encode,
    load_model,
    load_tokenizer,
    method_of,
    native_window,
    versions,
    weights_fingerprint,
)
from ropex.eval.pieces import hidden_states, in_pieces
from ropex.eval.progress import Progress, silent
from ropex.eval.share import gather, processes
from ropex.head import scale_logits
from ropex.text import Document, read, read_all, sources

CELLS, KEY = "nll.jsonl", ("checkpoint", "method", "length", "fingerprint")

_CHUNK_VALUES = 2**26  # logits held at once, in float32: 256 MiB
_RESAMPLES = 2000
_HEAD_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # mean, nats; 16-bit logits are coarser
_HEAD_TOLERANCE_16BIT = 0.25


@dataclass(frozen=True)
class Window:
    """ids [T], BOS included, of one document; the tokens from `first` on are scored here and nowhere else."""

    document: int
    ids: list[int]
    first: int


def evaluate_nll(
    checkpoints: Sequence[str],
    data: Sequence[str | Path],
    lengths: Sequence[int],
    *,
    dtype: str | torch.dtype | None = None,
    buckets: int = 8,
    bucket_width: int | None = None,
    windows: int | None = None,
    documents: int | None = None,
    stride: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Mean NLL per token, over all positions and by position, on the same tokens for every checkpoint.

    data: as ropex.text.sources takes it; a Hub dataset's test split. Each document is tokenised by itself. Without
    `stride` it is cut into windows of exactly `length` tokens that do not overlap; what is left at its end is not
    scored, and documents shorter than `length` are left out and counted. With `stride` the window slides by that many
    tokens and scores those that are new to it, so that every token of every document but its first is scored once, with
    at least `length - stride` tokens before it where the document has them. A window starts with BOS, counted in its
    length, if the tokenizer adds one by default. `windows` bounds the windows taken from one document; `documents`
    takes the first so many that reach the greatest length and reads no further (default: all).

    Positions run from 0; a bucket covers positions start <= p < end. There are `buckets` of them of (nearly)
    equal width, or as many of `bucket_width` tokens as the length needs. An empty bucket has nll None.

    With `out`, a folder, each checkpoint and length is kept there as it is done, a later run with the same settings,
    text and weights takes it from there, and report.json is written at the end.

    Returns {"kind", "results": [{"checkpoint", "method", "length", "mean", "interval", "difference", "tokens",
    "buckets": [{"start", "end", "nll", "tokens"}], "perplexity", "windows", "documents": [{"name", "nll", "tokens"}],
    "documents_left_out", "native_window"}], "settings"}. interval: of the mean, 95%, documents drawn anew (None for a
    single one); difference: {"to", "mean", "interval"}, from the first checkpoint, on the same drawn documents. Raises
    DataError where no document reaches a length, OptionError where the tokenizers differ.
    """
    _check_options(checkpoints, lengths, buckets, bucket_width, windows, documents, stride)
    report = progress if progress and processes().is_main_process else silent
    texts = read_long(data, documents, 0 if stride else max(lengths), checkpoints[0])
    tokens, bos = _tokenise(checkpoints, texts)
    cuts = {length: cut_windows(tokens, length, bos, windows, stride) for length in dict.fromkeys(lengths)}
    for length, cut in cuts.items():
        if not cut:
            raise DataError(_too_short(texts, tokens, length - len(bos)))
    settings: dict[str, Any] = {"buckets": buckets, "bucket_width": bucket_width, "windows": windows, "stride": stride}
    names = [text.name for text in texts]
    log = Log(out, CELLS, KEY)
    total = len(checkpoints) * sum(len(cut) for cut in cuts.values())
    done = 0
    results: list[dict[str, Any]] = []
    for checkpoint in checkpoints:
        report(f"loading {checkpoint}", done, total)
        model = load_model(checkpoint, dtype)
        weights, checked = weights_fingerprint(model), False
        for length, cut in cuts.items():
            key = {
                "checkpoint": checkpoint,
                "method": method_of(model),
                "length": length,
                "fingerprint": _fingerprint([weights, str(model.dtype), settings, [w.ids for w in cut], names]),
            }
            row = log.get(key)
            if row is None:
                if not checked:
                    check_head(model, checkpoint, torch.tensor([cut[0].ids[:16]]))
                    checked = True
                edges = bucket_edges(length, buckets, bucket_width)
                name = f"{checkpoint} at {length}"

                def step(at: int, name: str = name, before: int = done) -> None:
                    report(name, before + at, total)

                row = key | _measure(model, cut, length, edges, texts, step)
                log.add(row)
            done += len(cut)
            results.append({k: v for k, v in row.items() if k != "fingerprint"})
        del model
    report("done", total, total)
    told = {
        "dtype": str(dtype or "as stored"),
        "text": _fingerprint([[w.ids for w in cut] for cut in cuts.values()]),
        "versions": versions(),
    }
    table = {"kind": "nll", "results": _compared(results), "settings": settings | told}
    log.finish(table)
    return table


def _measure(
    model: PreTrainedModel,
    cut: Sequence[Window],
    length: int,
    edges: Sequence[int],
    documents: Sequence[Document],
    step: Callable[[int], None],
) -> dict[str, Any]:
    """One checkpoint at one length, as a row of the results."""
    sums = torch.zeros(length, dtype=torch.float64)
    counts = torch.zeros(length, dtype=torch.int64)
    totals = torch.zeros(len(documents), 2, dtype=torch.float64)  # of each document: nats and tokens
    everyone = processes()
    for done, window in enumerate(cut):
        step(done)
        if done % everyone.num_processes != everyone.process_index:
            continue
        ids = torch.tensor([window.ids], device=model.device)
        losses = token_nll(model, ids)[0, window.first - 1 :].double().cpu()
        if not torch.isfinite(losses).all():
            raise CheckpointError(
                f"the loss is not finite at length {length}: try another dtype, such as float32; if it stays, the "
                "checkpoint is damaged"
            )
        sums[window.first : len(window.ids)] += losses
        counts[window.first : len(window.ids)] += 1
        totals[window.document] += torch.tensor([float(losses.sum()), len(losses)], dtype=torch.float64)
    sums, counts, totals = (torch.stack(parts).sum(0) for parts in zip(*gather((sums, counts, totals)), strict=True))
    scored = [(d, nll / count, int(count)) for d, (nll, count) in enumerate(totals.tolist()) if count]
    return summarise(sums, counts, edges) | {
        "windows": len(cut),
        "documents": [{"name": documents[d].name, "nll": nll, "tokens": count} for d, nll, count in scored],
        "documents_left_out": len(documents) - len(scored),
        "native_window": native_window(model),
    }


def _compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with intervals of their means, and of the differences from the first row of their length."""
    first: dict[int, dict[str, Any]] = {}
    out = []
    for row in rows:
        base = first.setdefault(row["length"], row)
        difference = None
        if base is not row:
            difference = {
                "to": base["checkpoint"], "mean": row["mean"] - base["mean"], "interval": _interval(row, base)
            }  # fmt: skip
        out.append(row | {"interval": _interval(row), "difference": difference})
    return out


def _interval(row: dict[str, Any], base: dict[str, Any] | None = None) -> list[float] | None:
    """95% percentile bootstrap over documents of the mean, or of its difference from the base's. Fixed seed."""
    tokens = np.array([d["tokens"] for d in row["documents"]], dtype=np.float64)
    if len(tokens) < 2:
        return None
    sums = tokens * [d["nll"] for d in row["documents"]]
    if base is not None:
        sums = sums - tokens * [d["nll"] for d in base["documents"]]
    drawn = np.random.default_rng(0).integers(len(tokens), size=(_RESAMPLES, len(tokens)))
    low, high = np.percentile(sums[drawn].sum(1) / tokens[drawn].sum(1), [2.5, 97.5])
    return [float(low), float(high)]


def token_nll(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """NLL of each token after the first: int64 [B, T] -> float32 [B, T - 1], in nats."""
    return token_scores(model, input_ids)[0]


@torch.no_grad()
def token_scores(model: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token after the first, int64 [B, T]: its NLL in nats, float32 [B, T - 1], and whether it is the most
    likely one, bool [B, T - 1].

    A long window is read in pieces, and the output embedding, in float32, is applied to as many positions at a time as
    256 MiB of logits allow: memory grows with T by the key/value cache alone.
    """

    def run(piece: int) -> tuple[Tensor, Tensor]:
        losses = [input_ids.new_zeros((len(input_ids), 0), dtype=torch.float32)]
        likely = [input_ids.new_zeros((len(input_ids), 0), dtype=torch.bool)]
        for start, hidden in hidden_states(model, input_ids, piece):
            targets = input_ids[:, start + 1 : start + 1 + piece]
            nll, most = _head_scores(model, hidden[:, : targets.shape[1]], targets)
            losses.append(nll)
            likely.append(most)
        return torch.cat(losses, 1), torch.cat(likely, 1)

    return in_pieces(model, input_ids.shape[1], run)


def _head_scores(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """NLL of targets [B, T] from hidden [B, T, H], and whether they are the most likely: float32 and bool [B, T]."""
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"{type(model).__name__} has no output embedding: use a causal model")
    plain = type(head) is nn.Linear
    weight = head.weight.float() if plain else None
    bias = head.bias.float() if plain and head.bias is not None else None
    step = max(1, _CHUNK_VALUES // model.config.get_text_config().vocab_size)
    losses, likely = [rows.new_zeros(0).float()], [rows.new_zeros(0).bool()]
    for start in range(0, rows.shape[0], step):
        part, right = rows[start : start + step], wanted[start : start + step]
        logits = scale_logits(F.linear(part.float(), weight, bias) if weight is not None else head(part).float(), model)
        losses.append(F.cross_entropy(logits, right, reduction="none"))
        likely.append(logits.argmax(-1) == right)
    return torch.cat(losses).view(targets.shape), torch.cat(likely).view(targets.shape)


def cut_windows(
    documents: Sequence[Sequence[int]],
    length: int,
    bos: Sequence[int] = (),
    limit: int | None = None,
    stride: int | None = None,
) -> list[Window]:
    """Windows of at most `length` tokens, BOS counted, of one document each, at most `limit` of each document.

    Without a stride: exactly `length` tokens, without overlap, from the document's start; a rest too short is dropped.
    With one: each ends `stride` tokens after the one before, or at the document's end, and scores what is new to it. A
    stride that would leave a new token with nothing before it is shortened by that token.
    """
    width = length - len(bos)
    cut: list[Window] = []
    for number, ids in enumerate(documents):
        if stride is None:
            count = len(ids) // width if limit is None else min(limit, len(ids) // width)
            for start in range(0, count * width, width):
                cut.append(Window(number, [*bos, *ids[start : start + width]], 1))
            continue
        step, end, windows = min(stride, width if bos else width - 1), 0, 0
        while end < len(ids) and len(bos) + len(ids) > 1 and (limit is None or windows < limit):
            before, end = end, min(end + (step if end else width), len(ids))
            start = max(0, end - width)
            cut.append(Window(number, [*bos, *ids[start:end]], max(1, len(bos) + before - start)))
            windows += 1
    return cut


def bucket_edges(length: int, buckets: int = 8, width: int | None = None) -> list[int]:
    """Edges of the position buckets, from 0 to `length`: `buckets` near-equal ones, or all of one `width`."""
    if width is not None:
        return [*range(0, length, width), length]
    count = min(buckets, length)
    return [i * length // count for i in range(count + 1)]


def summarise(sums: Tensor, counts: Tensor, edges: Sequence[int]) -> dict[str, Any]:
    """Token-weighted mean and bucket means, from the NLL sum (float64 [T]) and count ([T]) by position."""
    tokens = int(counts.sum())
    mean = float(sums.sum()) / tokens
    buckets = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        count = int(counts[start:end].sum())
        nll = float(sums[start:end].sum()) / count if count else None
        buckets.append({"start": start, "end": end, "nll": nll, "tokens": count})
    perplexity = math.exp(mean) if mean < 700 else None  # float64 ends near exp(709)
    return {"mean": mean, "tokens": tokens, "buckets": buckets, "perplexity": perplexity}


@torch.no_grad()
def check_head(model: PreTrainedModel, checkpoint: str, input_ids: Tensor) -> None:
    """Hold `token_nll` to the model's own logits on a few tokens: a family may scale them its own way."""
    ids = input_ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    plain = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    apart = (token_nll(model, ids) - plain).abs().mean().item()
    if apart > _HEAD_TOLERANCE.get(model.dtype, _HEAD_TOLERANCE_16BIT):
        raise UnsupportedError(
            f"{checkpoint}: {type(model).__name__} turns hidden states into logits in a way "
            f"that ropex does not know (mean losses {apart:.3g} nats apart): it cannot be measured"
        )


def read_long(data: Sequence[str | Path], most: int | None, length: int, checkpoint: str) -> list[Document]:
    """All documents that are not blank, or the first `most` that have `length` tokens with BOS, and 2 in any case;
    where none has, the longest, to be named."""
    if most is None:
        return read_all(data, "test")
    tokenizer, long, longest = load_tokenizer(checkpoint), [], (-1, Document("", ""))
    for source in sources(data, "test"):
        for document in read(source):
            tokens = len(default_bos(tokenizer)) + len(encode(tokenizer, document.text)) if document.text.strip() else 0
            if tokens > longest[0]:
                longest = tokens, document
            if tokens >= max(2, length):
                long.append(document)
            if len(long) == most:
                return long
    return long or [longest[1]]


def check_text(checkpoint: str, data: Sequence[str | Path], length: int) -> None:
    """Raises DataError unless a document has `length` tokens with this checkpoint's tokenizer."""
    texts = read_long(data, 1, length, checkpoint)
    tokens, bos = _tokenise([checkpoint], texts)
    if max(map(len, tokens)) + len(bos) < length:
        raise DataError(_too_short(texts, tokens, length - len(bos)))


def _tokenise(checkpoints: Sequence[str], documents: Sequence[Document]) -> tuple[list[list[int]], list[int]]:
    """Token ids of each document, and the BOS that windows start with: the same for all the checkpoints."""
    first: tuple[list[list[int]], list[int]] | None = None
    for checkpoint in checkpoints:
        tokenizer = load_tokenizer(checkpoint)
        mine = [encode(tokenizer, document.text) for document in documents], default_bos(tokenizer)
        if first is None:
            first = mine
        elif mine != first:
            raise OptionError(
                f"{checkpoint} and {checkpoints[0]} tokenise the text differently, so their losses per token "
                "cannot be compared: evaluate them in separate runs"
            )
    assert first is not None
    return first


def _too_short(documents: Sequence[Document], tokens: Sequence[Sequence[int]], needed: int) -> str:
    longest = max(range(len(documents)), key=lambda i: len(tokens[i]))
    return (
        f"no document reaches {needed} tokens; the longest, {documents[longest].name}, has "
        f"{len(tokens[longest])}: ask for shorter lengths or add longer documents"
    )


def _fingerprint(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _check_options(
    checkpoints: Sequence[str],
    lengths: Sequence[int],
    buckets: int,
    bucket_width: int | None,
    windows: int | None,
    documents: int | None,
    stride: int | None,
) -> None:
    if not checkpoints or not lengths:
        raise OptionError("nothing to evaluate: name at least one checkpoint and one length")
    if (shortest := min(lengths)) < 3:
        raise OptionError(f"a length of {shortest} leaves no token to score: use 3 or more")
    for name, value in (
        ("buckets", buckets), ("bucket width", bucket_width), ("windows", windows), ("documents", documents),
        ("stride", stride),
    ):  # fmt: skip
        if value is not None and value < 1:
            raise OptionError(f"the {name} given, {value}, must be 1 or more")
    if stride is not None and stride > shortest:
        raise OptionError(
            f"a stride of {stride} would pass over tokens of windows of {shortest}: give {shortest} or less"
        )
