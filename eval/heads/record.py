"""What a pass over a text leaves of its queries and keys: the measures of sampled queries, clouds, pair sums."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropex.eval.heads.capture import Seen
from ropex.eval.heads.measures import Cloud, by_distance, effective_length, of_queries, pair_logits
from ropex.eval.heads.planted import Planted

PAIR_QUERIES = 16  # queries a window whose logits are split by channel pair


def sample_positions(length: int, queries: int, generator: torch.Generator) -> Tensor:
    """`queries` positions of 0 to length - 1, one drawn from each of as many equal parts, ascending: a mean over them
    is an unbiased estimate of the mean over all. All positions where they are no more than `queries`."""
    if queries >= length:
        return torch.arange(length)
    edges = torch.arange(queries + 1) * length // queries
    width = edges.diff()
    return edges[:-1] + (torch.rand(queries, generator=generator) * width).long().clamp(max=width - 1)


class TextRecord:
    """Of all windows of one length, by layer: measures of the sampled queries, and clouds of all queries and keys.

    values[layer][name]: [Hq, n]. positions: [n]. clouds[layer]: of (bare q, q, bare k, k). pair_sums[layer]: sums of
    |q_f . k_f| [Hq, F or F + 1, bins].
    """

    def __init__(self, length: int, queries: int, pairs: int, interleaved: bool, edges: Tensor | None) -> None:
        """edges: of the distance bins of pair_sums; None for a length whose pairs are of no interest."""
        self.length, self.queries, self.pairs, self.interleaved, self.edges = length, queries, pairs, interleaved, edges
        self.generator = torch.Generator().manual_seed(length)
        self.windows = 0
        self.at = torch.arange(0)
        self.positions: list[Tensor] = []
        self.clouds: dict[int, tuple[Cloud, Cloud, Cloud, Cloud]] = {}
        self.pair_sums: dict[int, Tensor] = {}
        self._parts: dict[int, list[dict[str, Tensor]]] = {}

    def next_window(self) -> None:
        self.windows += 1
        self.at = sample_positions(self.length, self.queries, self.generator)
        self.positions.append(self.at)

    def see(self, seen: Seen) -> None:
        """The listener for ropex.eval.heads.capture.watched."""
        self._parts.setdefault(seen.layer, []).extend(_measured(seen, self.at))
        clouds = self.clouds.setdefault(seen.layer, (Cloud(), Cloud(), Cloud(), Cloud()))
        keys = seen.k[:, -seen.q.shape[1] :]
        for cloud, vectors in zip(clouds, (seen.bare_q, seen.q, seen.bare_k, keys), strict=True):
            cloud.add(vectors)
        if self.edges is not None:
            later = self.at[self.at >= self.length // 2]
            for position in later[:: max(1, len(later) // PAIR_QUERIES)].tolist():
                self._split(seen, position)

    def _split(self, seen: Seen, position: int) -> None:
        """Add one query's logits by channel pair; q is compared with the keys up to its own token."""
        row, last = position - seen.start, position - seen.first_key + 1
        if not 0 <= row < seen.q.shape[1]:
            return
        keys = seen.k[:, :last].float().repeat_interleave(len(seen.q) // len(seen.k), 0)
        parts = pair_logits(seen.q[:, row].float(), keys, self.pairs, self.interleaved)
        assert self.edges is not None
        sums = by_distance(parts, self.edges.to(parts.device))
        self.pair_sums[seen.layer] = self.pair_sums.get(seen.layer, torch.zeros_like(sums)) + sums

    def values(self, layer: int) -> dict[str, Tensor]:
        """[Hq, n] of each measure, in the order of `positions` put together."""
        parts = self._parts[layer]
        return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def _measured(seen: Seen, at: Tensor) -> list[dict[str, Tensor]]:
    """of_queries for those of the positions `at` that this call holds, block by block, on the CPU."""
    rows = (at[(at >= seen.start) & (at < seen.start + seen.q.shape[1])] - seen.start).to(seen.q.device)
    keys = torch.arange(seen.k.shape[1], device=seen.q.device) + seen.first_key
    out = []
    for part, logits in seen.rows(rows):
        distance = (part + seen.start)[:, None] - keys
        found = of_queries(logits, distance, seen.first_key)
        out.append({name: value.cpu() for name, value in found.items()})
    return out


class NeedleRecord:
    """Where heads look while planted needles are told: for each sample [Hq] of mass, e2 and copies, by layer.

    mass: attention on the needle's tokens, a mean over the answer's queries. e2: effective length of these. copies: the
    share of them whose most attended token is, in the needle, the very token that is said next (retrieval score; Wu et
    al., Retrieval Head Mechanistically Explains Long-Context Factuality, 2024).
    """

    def __init__(self) -> None:
        self.samples: dict[int, list[dict[str, Tensor]]] = {}
        self.depths: list[float] = []
        self.planted: Planted | None = None

    def next_sample(self, planted: Planted) -> None:
        self.planted = planted
        self.depths.append(planted.depth)

    def see(self, seen: Seen) -> None:
        """The listener for ropex.eval.heads.capture.watched. The asking queries end a text, in one piece."""
        planted = self.planted
        assert planted is not None
        asking = torch.tensor(planted.asking, device=seen.q.device) - seen.start
        if not 0 <= int(asking[0]) <= int(asking[-1]) < seen.q.shape[1]:
            return
        start, end = (max(0, p - seen.first_key) for p in planted.needle)
        ids, said = torch.tensor(planted.ids[seen.first_key :]), torch.tensor(planted.said)
        parts: dict[str, list[Tensor]] = {}
        done = 0
        for part, logits in seen.rows(asking):
            alpha = logits.softmax(-1)
            top = alpha.argmax(-1).cpu()
            hit = (ids[top] == said[done : done + len(part)]) & (top >= start) & (top < end)
            done += len(part)
            parts.setdefault("mass", []).append(alpha[..., start:end].sum(-1).cpu())
            parts.setdefault("e2", []).append(effective_length(alpha).cpu())
            parts.setdefault("copies", []).append(hit.float())
        means = {name: torch.cat(values, 1).mean(1) for name, values in parts.items()}
        self.samples.setdefault(seen.layer, []).append(means)

    def summary(self, layer: int) -> dict[str, Any]:
        """Means over the samples, lists of Hq; `least` is the least mass among them, wherever the needle lay."""
        found: Sequence[dict[str, Tensor]] = self.samples[layer]
        stacked = {name: torch.stack([sample[name] for sample in found]) for name in found[0]}
        means = {name: values.mean(0).tolist() for name, values in stacked.items()}
        return means | {"least": stacked["mass"].amin(0).tolist()}
