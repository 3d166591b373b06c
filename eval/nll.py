"""Loss by position: how well a checkpoint predicts the tokens of whole windows, early and late in the window.

`nll` is the negative log-likelihood of a token given all that stands before it in its window, in nats.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropex.errors import CheckpointError, DataError, OptionError, UnsupportedError
from ropex.eval.models import default_bos, encode, load_model, load_tokenizer, method_of, native_window
from ropex.eval.progress import Progress, silent
from ropex.eval.text import Document, read_documents
from ropex.head import scale_logits

_CHUNK_VALUES = 2**26  # logits held at once, in float32: 256 MiB
_HEAD_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # mean, nats; 16-bit logits are coarser
_HEAD_TOLERANCE_16BIT = 0.25


def evaluate_nll(
    checkpoints: Sequence[str],
    files: Sequence[Path],
    lengths: Sequence[int],
    *,
    dtype: str | torch.dtype | None = None,
    buckets: int = 8,
    bucket_width: int | None = None,
    windows: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Mean NLL per token, over all positions and by position, on the same tokens for every checkpoint.

    Each document is tokenised by itself and cut into windows of exactly `length` tokens that do not overlap;
    a window starts with BOS if the tokenizer adds one by default. Every token of a window but its first is
    scored once. `windows` bounds the windows taken from one document (default: all); what is left at its
    end is not scored, and documents shorter than `length` are left out and counted.

    Positions run from 0; a bucket covers positions start <= p < end. There are `buckets` of them of (nearly)
    equal width, or as many of `bucket_width` tokens as the length needs. An empty bucket has nll None.

    Returns {"results": [{"checkpoint", "method", "length", "mean", "tokens", "buckets": [{"start", "end",
    "nll", "tokens"}], "perplexity", "windows", "documents", "documents_left_out", "native_window"}]}.
    Raises DataError where no document reaches a length, OptionError where the tokenizers differ.
    """
    _check_options(checkpoints, lengths, buckets, bucket_width, windows)
    report = progress or silent
    documents = read_documents(files)
    tokens, bos = _tokenise(checkpoints, documents)
    cuts = {length: cut_windows(tokens, length, bos, windows) for length in dict.fromkeys(lengths)}
    for length, cut in cuts.items():
        if not len(cut):
            raise DataError(_too_short(documents, tokens, length - len(bos)))
    total = len(checkpoints) * sum(len(cut) for cut in cuts.values())
    done = 0
    results: list[dict[str, Any]] = []
    for checkpoint in checkpoints:
        report(f"loading {checkpoint}", done, total)
        model = load_model(checkpoint, dtype)
        _check_head(model, checkpoint, next(iter(cuts.values()))[:1, :16])
        for length, cut in cuts.items():
            sums = torch.zeros(length, dtype=torch.float64)
            for window in cut:
                report(f"{checkpoint} at {length}", done, total)
                sums[1:] += token_nll(model, window[None].to(model.device))[0].double().cpu()
                done += 1
            if not torch.isfinite(sums).all():
                raise CheckpointError(
                    f"{checkpoint} gives a loss that is not finite at length {length}: try another dtype, "
                    "such as float32; if it stays, the checkpoint is damaged"
                )
            counts = torch.full((length,), len(cut), dtype=torch.int64)
            counts[0] = 0
            used = sum(len(ids) + len(bos) >= length for ids in tokens)
            results.append(
                {
                    "checkpoint": checkpoint,
                    "method": method_of(model),
                    "length": length,
                    **summarise(sums, counts, bucket_edges(length, buckets, bucket_width)),
                    "windows": len(cut),
                    "documents": used,
                    "documents_left_out": len(tokens) - used,
                    "native_window": native_window(model),
                }
            )
        del model
    report("done", total, total)
    return {"results": results}


@torch.no_grad()
def token_nll(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """NLL of each token after the first: int64 [B, T] -> float32 [B, T - 1], in nats.

    The decoder runs once over the whole window. The output embedding, in float32, is applied to as many
    positions at a time as 256 MiB of logits allow, so memory does not grow with T times the vocabulary.
    """
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), input_ids[:, 1:].reshape(-1)
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"{type(model).__name__} has no output embedding: use a causal model")
    plain = type(head) is nn.Linear
    weight = head.weight.float() if plain else None
    bias = head.bias.float() if plain and head.bias is not None else None
    step = max(1, _CHUNK_VALUES // model.config.get_text_config().vocab_size)
    losses = []
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        logits = F.linear(part.float(), weight, bias) if weight is not None else head(part).float()
        losses.append(F.cross_entropy(scale_logits(logits, model), targets[start : start + step], reduction="none"))
    return torch.cat(losses).view(hidden.shape[:2]) if losses else rows.new_zeros(hidden.shape[:2]).float()


def cut_windows(
    documents: Sequence[Sequence[int]], length: int, bos: Sequence[int] = (), limit: int | None = None
) -> Tensor:
    """Non-overlapping windows of exactly `length` tokens: int64 [windows, length].

    Each starts with `bos` (counted in the length) and holds tokens of one document only. At most `limit`
    are taken from a document, from its start; a rest too short for a window is dropped.
    """
    width = length - len(bos)
    cut: list[list[int]] = []
    for ids in documents:
        count = len(ids) // width if limit is None else min(limit, len(ids) // width)
        cut += [[*bos, *ids[i * width : (i + 1) * width]] for i in range(count)]
    return torch.tensor(cut, dtype=torch.int64).view(-1, length)


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
def _check_head(model: PreTrainedModel, checkpoint: str, input_ids: Tensor) -> None:
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


def _check_options(
    checkpoints: Sequence[str],
    lengths: Sequence[int],
    buckets: int,
    bucket_width: int | None,
    windows: int | None,
) -> None:
    if not checkpoints or not lengths:
        raise OptionError("nothing to evaluate: name at least one checkpoint and one length")
    if (shortest := min(lengths)) < 3:
        raise OptionError(f"a length of {shortest} leaves no token to score: use 3 or more")
    for name, value in (("buckets", buckets), ("bucket width", bucket_width), ("windows", windows)):
        if value is not None and value < 1:
            raise OptionError(f"the {name} given, {value}, must be 1 or more")
