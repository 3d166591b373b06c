"""Every measure against brute force over the eager attention weights of tiny models."""

import math

import pytest
import torch
from families import tiny
from torch import Tensor

from ropex import attach
from ropex.eval.heads.capture import Seen, watched
from ropex.eval.heads.measures import (
    Cloud,
    criteria,
    effective_length,
    growth,
    overlap,
    pair_logits,
    variation,
)
from ropex.eval.heads.planted import Planted
from ropex.eval.heads.probe import probe
from ropex.eval.heads.rotary import pairing
from ropex.families import FAMILIES
from ropex.seam import rope_of_model
from ropex.spec import make_spec
from ropex.tables import table

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
IDS = torch.randint(3, 97, (96,), generator=torch.Generator().manual_seed(1)).tolist()
OWN: dict[str, dict] = {"mistral": {"sliding_window": 24}, "starcoder2": {"sliding_window": 24}}


def eager(model, ids: list[int]) -> list[Tensor]:
    """The attention weights [Hq, T, T] of each layer that attends, in order."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    return [weights[0] for weights in out.attentions if weights is not None]


def brute(alpha: Tensor) -> dict[str, list[float]]:
    """Means over all queries, written as the definitions have them."""
    heads, tokens, _ = alpha.shape
    near = torch.tensor([[0 <= i - j < 8 for j in range(tokens)] for i in range(tokens)])
    return {
        "e2": [sum(1 / float((row**2).sum()) for row in head) / tokens for head in alpha],
        "sink": alpha[:, :, 0].mean(1).tolist(),
        "local": (alpha * near).sum(-1).mean(1).tolist(),
        "previous": [
            sum(float(alpha[h, i, i - 1]) for i in range(1, tokens)) / tokens for h in range(heads)
        ],
    }  # fmt: skip


def check(model) -> None:
    found = probe(model, {len(IDS): [IDS]}, {}, queries=len(IDS))
    weights = eager(model, IDS)
    layers = sorted({head["layer"] for head in found["heads"]})
    assert len(layers) == len(weights) > 0
    for layer, alpha in zip(layers, weights, strict=True):
        heads = [head for head in found["heads"] if head["layer"] == layer]
        assert [head["head"] for head in heads] == list(range(len(alpha)))
        for name, wanted in brute(alpha).items():
            torch.testing.assert_close([head[name][str(len(IDS))] for head in heads], wanted, **CLOSE)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_measures_are_those_of_the_eager_attention_weights(name):
    check(tiny(name, **OWN.get(name, {})))


@pytest.mark.parametrize("name", ["llama", "phi", "gemma3_text", "gemma2", "glm"])
def test_and_so_they_are_where_every_head_has_learned(name, stir):
    model = tiny(name)
    attach(model, make_spec("adarope", rope_of_model(model), target=256))
    stir(model)
    check(model)


def test_a_text_read_in_pieces_measures_as_one_read_whole(monkeypatch):
    from ropex.eval import pieces

    model = tiny("gemma3_text", sliding_window=24)
    whole = probe(model, {96: [IDS]}, {}, queries=40)
    monkeypatch.setattr(pieces, "WHOLE", 32)
    monkeypatch.setattr(pieces, "PIECE", 32)
    pieced = probe(model, {96: [IDS]}, {}, queries=40)
    for a, b in zip(whole["heads"], pieced["heads"], strict=True):
        for name in ("e2", "sink", "largest", "local", "previous"):
            torch.testing.assert_close(a[name], b[name], **CLOSE)
        torch.testing.assert_close(a["geometry"], b["geometry"], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "phi", "gpt_neox", "glm"])
def test_largest_logits_clouds_and_pairs_are_those_of_q_and_k(name):
    """Against q and k rotated here by the table, from the projections' own outputs."""
    model = tiny(name)
    rope = rope_of_model(model)
    seen = []
    with watched(model, seen.append):
        model.get_decoder()(torch.tensor([IDS]))
    one = seen[1]
    turn = torch.outer(torch.arange(len(IDS)).float(), table("rope", rope, {}).theta)
    turned = _turned(one.bare_q, turn, rope.pairing == "interleaved")
    torch.testing.assert_close(one.q, turned, **CLOSE)
    torch.testing.assert_close(one.k, _turned(one.bare_k, turn, rope.pairing == "interleaved"), **CLOSE)

    found = [h for h in probe(model, {96: [IDS]}, {}, queries=96)["heads"] if h["layer"] == one.layer]
    k = one.k.repeat_interleave(len(one.q) // len(one.k), 0)
    logits = (one.q @ k.transpose(1, 2) * one.scaling).masked_fill(~torch.ones(96, 96).tril().bool(), -torch.inf)
    torch.testing.assert_close([h["largest"]["96"] for h in found], logits.amax(-1).mean(-1).tolist(), **CLOSE)
    for h, head in enumerate(found):
        geometry = head["geometry"]["96"]
        for at, (q, key) in enumerate(((one.bare_q, one.bare_k), (one.q, one.k))):
            values = torch.linalg.svdvals(q[h].double())
            assert geometry["q_stable_rank"][at] == pytest.approx(float((values**2).sum() / values[0] ** 2), rel=1e-4)
            assert geometry["q_first_singular"][at] == pytest.approx(float(values[0]) / 96**0.5, rel=1e-4)
            values = torch.linalg.svdvals(key[head["kv_head"]].double())
            assert geometry["k_stable_rank"][at] == pytest.approx(float((values**2).sum() / values[0] ** 2), rel=1e-4)
            cosine = torch.cosine_similarity(q[h].mean(0), key[head["kv_head"]].mean(0), dim=0)
            assert geometry["mean_cosine"][at] == pytest.approx(float(cosine), abs=1e-4)
        assert sum(head["pairs"]["shares"]) == pytest.approx(1, abs=1e-5)
        assert len(head["pairs"]["shares"]) == rope.pairs + (rope.rotary_dim < rope.head_dim)


def _turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [H, T, D] as complex numbers, multiplied by e^(i angle) [T, F]."""
    span = 2 * angles.shape[1]
    a, b = (x[..., :span:2], x[..., 1:span:2]) if interleaved else x[..., :span].chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    both = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((both, x[..., span:]), -1)


@torch.no_grad()
def test_the_parts_of_a_logit_add_up_to_it():
    q, k = torch.randn(2, 24), torch.randn(2, 5, 24)
    for interleaved in (True, False):
        q2, k2 = q.clone(), k.clone()
        parts = pair_logits(q2, k2, 8, interleaved)
        assert parts.shape == (2, 9, 5)
        only = torch.zeros(24)
        only[[2, 3] if interleaved else [1, 9]] = 1  # the second pair
        torch.testing.assert_close(parts[:, 1], torch.einsum("hd,htd->ht", q * only, k).abs())
        torch.testing.assert_close(parts[:, 8], torch.einsum("hd,htd->ht", q[:, 16:], k[..., 16:]).abs())


def test_effective_length_counts_the_tokens_that_matter():
    for beta in (1.0, 2.0, 3.0):
        for tokens in (1, 4, 50):
            assert effective_length(torch.full((1, 1, tokens), 1 / tokens), beta).item() == pytest.approx(tokens)
    assert effective_length(torch.tensor([[[0.5, 0.25, 0.25, 0.0]]]), 1.0).item() == pytest.approx(2**1.5)


def test_growth_is_the_exponent():
    assert growth([128, 512, 2048], [3 * length**0.7 for length in (128, 512, 2048)]) == pytest.approx(0.7)
    assert growth([128], [5.0]) is None


def test_clouds_know_their_rank():
    line, sphere = Cloud(), Cloud()
    line.add(torch.randn(1, 50, 1) @ torch.randn(1, 1, 16))
    sphere.add(torch.eye(16)[None])
    assert line.stable_rank().item() == pytest.approx(1, abs=1e-6)
    assert sphere.stable_rank().item() == pytest.approx(16)


def test_variation_is_nought_when_pairs_are_used_alike():
    assert variation(torch.full((1, 16), 1 / 16)).item() == pytest.approx(0, abs=1e-6)
    assert variation(torch.eye(16)[:1]).item() == pytest.approx(math.sqrt(15))


@pytest.mark.parametrize(
    ("name", "bounded", "reached"),
    [("rope", False, False), ("half-rope", True, False), ("high-freq", False, True), ("rope-id", True, True)],
)
def test_each_of_the_four_tables_meets_the_criteria_that_it_should(name, bounded, reached):
    rope = rope_of_model(tiny("llama", head_dim=64, max_position_embeddings=2048))
    theta = make_spec(name, rope).table(rope).theta
    found = criteria(theta, 2048)
    assert (found["bounded"], found["reached"]) == (bounded, reached), found
    brute_force = torch.polar(torch.ones(300, 32), torch.outer(torch.arange(300.0), theta)).mean(0).abs().mean()
    assert overlap(theta, [300])[0] == pytest.approx(float(brute_force), abs=1e-4)


def test_a_sample_of_queries_says_how_far_off_it_may_be():
    model = tiny("llama")
    exact = probe(model, {96: [IDS]}, {}, queries=96)["heads"]
    drawn = probe(model, {96: [IDS]}, {}, queries=32)["heads"]
    off = [
        abs(a["e2"]["96"] - b["e2"]["96"]) / b["e2_error"]["96"]
        for a, b in zip(exact, drawn, strict=True)
    ]  # fmt: skip
    assert all(head["e2_error"]["96"] == 0 for head in exact)
    assert all(head["e2_error"]["96"] > 0 for head in drawn)
    assert max(off) < 4 and sum(value < 2 for value in off) > 0.85 * len(off)


def test_watching_leaves_the_model_as_it_was():
    model = tiny("llama")
    ids = torch.tensor([IDS])
    with torch.no_grad():
        before = model(ids).logits
        with watched(model, lambda seen: None):
            torch.testing.assert_close(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "ropex_watch") for module in model.modules())


def test_a_long_window_never_has_all_its_weights_at_once():
    """SmolLM2-135M's heads over 16,384 tokens, by shapes alone: 9.7 GB of logits a layer, 32 MiB at a time."""
    q, k = torch.empty(9, 16_384, 64, device="meta"), torch.empty(3, 16_384, 64, device="meta")
    seen = Seen(0, q, k, q, k, None, 0.125, None, 0)
    blocks = [logits.shape for _, logits in seen.rows(torch.arange(256, device="meta"))]
    assert all(shape.numel() <= 2**23 and shape[2] == 16_384 for shape in blocks)
    assert sum(shape[1] for shape in blocks) == 256


@pytest.mark.parametrize("name", ["llama", "phi", "mistral"])
def test_needles_are_found_where_the_eager_weights_say(name):
    model = tiny(name, **OWN.get(name, {}))
    ids = [*IDS[:90], *IDS[40:46]]  # the end says again what stands at 40 to 45
    planted = Planted(ids, [90, 91, 92], ids[91:94], (80, 90), 0.8)
    near = Planted(ids, [50], [ids[51]], (38, 46), 0.4)
    found = probe(model, {96: [ids]}, {96: [planted, near]}, queries=96)["heads"]
    for layer, alpha in enumerate(eager(model, ids)):
        asking = [(alpha[:, 90:93], planted), (alpha[:, 50:51], near)]
        masses = [weights[..., slice(*sample.needle)].sum(-1).mean(1) for weights, sample in asking]
        lengths = [(1 / weights.square().sum(-1)).mean(1) for weights, _ in asking]
        copies = []
        for weights, sample in asking:
            top = weights.argmax(-1)
            right = torch.tensor(ids)[top] == torch.tensor(sample.said)
            copies.append((right & (top >= sample.needle[0]) & (top < sample.needle[1])).float().mean(1))
        heads = [head["needle"]["96"] for head in found if head["layer"] == layer]
        for key, wanted in (
            ("mass", sum(masses) / 2),
            ("least", torch.minimum(*masses)),
            ("e2", sum(lengths) / 2),
            ("copies", sum(copies) / 2),
        ):
            torch.testing.assert_close(torch.tensor([head[key] for head in heads]), wanted, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "phi", "glm"])
def test_shares_of_pairs_by_distance_are_sums_over_queries_and_keys(name):
    """Two windows of 32 tokens: the queries are those of the second half, and every key that each may see."""
    model = tiny(name)
    texts = [IDS[:32], IDS[40:72]]
    found = [head for head in probe(model, {32: texts}, {}, queries=32)["heads"] if head["layer"] == 1]
    seen = []
    for ids in texts:
        with watched(model, seen.append):
            model.get_decoder()(torch.tensor([ids]))
    ones = [one for one in seen if one.layer == 1]
    pairs, interleaved = pairing(model)
    for h in (0, 7):
        sums = torch.zeros(len(found[h]["pairs"]["shares"]), 6)  # distances 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31
        for one in ones:
            q, k = one.q[h], one.k[h // 4]
            for i in range(16, 32):
                for j in range(i + 1):
                    for f in range(len(sums)):
                        c = [2 * f, 2 * f + 1] if interleaved else [f, f + pairs]
                        c = list(range(2 * pairs, q.shape[1])) if f == pairs else c
                        sums[f, (i - j).bit_length()] += (q[i, c] @ k[j, c]).abs()
        told = found[h]["pairs"]
        torch.testing.assert_close(torch.tensor(told["shares"]), sums.sum(1) / sums.sum(), **CLOSE)
        torch.testing.assert_close(torch.tensor(told["by_distance"])[:6], (sums / sums.sum(0)).T, **CLOSE)
        turning = sums.sum(1)[:pairs]
        assert told["variation"] == pytest.approx(float(turning.std(correction=0) / turning.mean()), rel=1e-4)


def test_curves_by_position_are_means_of_their_bins():
    model = tiny("llama")
    found = probe(model, {96: [IDS, IDS[::-1]]}, {}, queries=96)
    edges = found["positions"]["edges"]
    assert edges[0] == 0 and edges[-1] == 96 and len(edges) == 17
    both = torch.stack([torch.stack(eager(model, ids))[..., 0] for ids in (IDS, IDS[::-1])])  # [2, layers, Hq, T]
    for head in found["heads"]:
        weights = both[:, head["layer"], head["head"]]
        wanted = [float(weights[:, a:b].mean()) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        torch.testing.assert_close(head["by_position"]["sink"], wanted, **CLOSE)
