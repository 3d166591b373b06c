"""What a head does, as numbers: pure functions over logits, attention weights, queries and keys.

H heads, n queries, T keys, D head_dim, F channel pairs. alpha [H, n, T] are a query's attention weights, which sum to
1; `distance` [n, T] is query position less key position, in tokens, negative where a query may not look.
"""

import math

import torch
from torch import Tensor

LOCAL = 8  # tokens: `local` is the mass on a query's own token and the 7 before it


def effective_length(alpha: Tensor, beta: float = 2.0) -> Tensor:
    """E_beta = (sum_j alpha_j^beta)^(1/(1-beta)), the effective attention length of each query, in tokens: [H, n].

    1 for a query that looks at one token, T for one that looks at T alike. beta = 2 is the inverse participation ratio,
    beta -> 1 the exponential of the entropy (Hill numbers; AdaRoPE, ICML 2026, uses beta = 2).
    """
    if beta == 1:
        return torch.exp(-torch.special.xlogy(alpha, alpha).sum(-1))
    return alpha.pow(beta).sum(-1).pow(1 / (1 - beta))


def of_queries(logits: Tensor, distance: Tensor, first_key: int = 0, local: int = LOCAL) -> dict[str, Tensor]:
    """Measures of each query, [H, n] each, from logits [H, n, T] that are -inf where a query may not look.

    e2: effective_length. sink: weight on the row's first token (0 where a sliding window has left it behind; attention
    sinks, Xiao et al., ICLR 2024). largest: the largest logit, q.k with every scale, which RoPE-ID (ICLR 2026) shows
    to leave its trained range past the window. local: mass on the last `local` tokens, the query's own among them.
    previous: weight on the token before (an off-by-one head).
    """
    alpha = logits.softmax(-1)
    none = torch.zeros(alpha.shape[:2], device=alpha.device)
    near, one = (distance >= 0) & (distance < local), distance == 1
    return {
        "e2": effective_length(alpha),
        "sink": alpha[..., 0] if first_key == 0 else none,
        "largest": logits.amax(-1),
        "local": (alpha * near).sum(-1),
        "previous": (alpha * one).sum(-1),
    }


def growth(lengths: list[int], e2: list[float]) -> float | None:
    """Slope of log E_2 on log L by least squares: 0 for a head whose reach is fixed, 1 for one that averages all it is
    given. None for a single length."""
    if len(lengths) < 2:
        return None
    x = [math.log(length) for length in lengths]
    y = [math.log(max(value, 1e-12)) for value in e2]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return over / sum((a - mean_x) ** 2 for a in x)


class Cloud:
    """The vectors [H, N, D] of a layer's heads, added piece by piece; what is kept is D x D a head.

    With X the N x D matrix of a head's vectors, in double precision.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.gram: Tensor | float = 0.0
        self.sum: Tensor | float = 0.0

    def add(self, vectors: Tensor) -> None:
        x = vectors.double()
        self.tokens += x.shape[1]
        self.gram = self.gram + x.transpose(1, 2) @ x
        self.sum = self.sum + x.sum(1)

    def stable_rank(self) -> Tensor:
        """||X||_F^2 / ||X||_2^2 [H]: 1 for a cloud on one line, up to D for one that fills its space evenly."""
        gram = torch.as_tensor(self.gram)
        return gram.diagonal(dim1=-2, dim2=-1).sum(-1) / self._largest()

    def first_singular_value(self) -> Tensor:
        """||X||_2 / sqrt(N) [H]: the root mean square of the vectors along their first direction."""
        return (self._largest() / self.tokens).sqrt()

    def mean(self) -> Tensor:
        """[H, D]"""
        return torch.as_tensor(self.sum) / self.tokens

    def _largest(self) -> Tensor:
        return torch.linalg.eigvalsh(torch.as_tensor(self.gram))[..., -1].clamp(min=1e-30)


def mean_cosine(q: Cloud, k: Cloud) -> Tensor:
    """Cosine [Hq] between the mean query of each head and the mean key that it looks at. Rotation that turns all pairs
    far enough takes both means to zero and leaves their angle to chance (RoPE-ID, ICLR 2026)."""
    of_q = q.mean()
    of_k = k.mean().repeat_interleave(len(of_q) // len(k.mean()), 0)
    return torch.cosine_similarity(of_q, of_k, dim=-1)


def split_pairs(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """x [..., D] as its channel pairs [..., F, 2] and the channels that never turn [..., D - 2F]."""
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    shape = (pairs, 2) if interleaved else (2, pairs)
    both = turning.unflatten(-1, shape)
    return (both if interleaved else both.transpose(-1, -2)), rest


def pair_logits(q: Tensor, k: Tensor, pairs: int, interleaved: bool) -> Tensor:
    """|q_f . k_f|, the size of what each channel pair adds to q.k: [H, F or F + 1, T] of one query q [H, D] and its
    keys k [H, T, D]. The last row, where there is one, is of the channels that never turn."""
    (q_pairs, q_rest), (k_pairs, k_rest) = split_pairs(q, pairs, interleaved), split_pairs(k, pairs, interleaved)
    parts = torch.einsum("hfc,htfc->hft", q_pairs, k_pairs).abs()
    if not q_rest.shape[-1]:
        return parts
    return torch.cat((parts, torch.einsum("hc,htc->ht", q_rest, k_rest).abs()[:, None]), 1)


def by_distance(parts: Tensor, edges: Tensor) -> Tensor:
    """Sums of parts [H, F, T], whose last key is the query's own, over distances edges[b] <= d < edges[b + 1]:
    [H, F, bins]."""
    distance = torch.arange(parts.shape[-1] - 1, -1, -1, device=parts.device)
    bins = torch.bucketize(distance, edges, right=True) - 1
    inside = (bins >= 0) & (bins < len(edges) - 1)
    out = parts.new_zeros(*parts.shape[:2], len(edges) - 1)
    return out.index_add_(-1, bins[inside], parts[..., inside])


def variation(shares: Tensor) -> Tensor:
    """Coefficient of variation [H] of the pairs' shares [H, F]: their standard deviation over their mean. 0 when all
    pairs matter alike, sqrt(F - 1) when one alone does (AdaRoPE, ICML 2026, on pair utilisation)."""
    return shares.std(-1, correction=0) / shares.mean(-1).clamp(min=1e-30)


def overlap(theta: Tensor, lengths: list[int], weights: Tensor | None = None) -> list[float]:
    """How much of a cluster's mean is left after rotation over positions 0 to L - 1, for each L of `lengths`.

    sum_f w_f |sin(L theta_f / 2) / (L sin(theta_f / 2))|, with theta [F] in radians per token and weights w [F] that
    sum to 1 (alike unless given): the length of the mean of unit vectors turned by theta_f a token. A pair at
    rest keeps all.
    """
    half = theta.double() / 2
    w = torch.full_like(half, 1 / len(half)) if weights is None else weights.double()
    out = []
    for length in lengths:
        turned = (torch.sin(half).abs() * length).clamp(min=1e-30)
        kept = torch.where(half == 0, torch.ones_like(half), (torch.sin(length * half).abs() / turned).clamp(max=1))
        out.append(float((w * kept).sum()))
    return out


def criteria(theta: Tensor, window: int, weights: Tensor | None = None) -> dict[str, float | bool | None]:
    """The two criteria for a table [F] that is to work beyond its training `window`, in tokens (RoPE-ID, ICLR 2026).

    limit: the overlap of clusters as L grows without bound, the weight of the pairs at rest. bounded: is that away from
    nothing (above 0.1)? at_window: the overlap after `window` tokens. turns: how often the slowest pair that turns goes
    round within the window (None where none turns). reached: at least once, so that longer inputs show the model no new
    angle. rope fails both, high-freq the first, half-rope the second where its slowest pair is slow, rope-id none.
    """
    w = torch.full_like(theta, 1 / len(theta)) if weights is None else weights
    limit = float(w[theta == 0].sum())
    turns = float(theta[theta > 0].min()) * window / (2 * math.pi) if bool((theta > 0).any()) else None
    return {
        "limit": limit, "at_window": overlap(theta, [window], weights)[0], "turns": turns, "bounded": limit > 0.1,
        "reached": turns is None or turns >= 1,
    }  # fmt: skip
