import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import ANGLE_FAST, ANGLE_SLOW, NORM

from ropex.rotary import AdaRotary


def make(theta0, heads=8, kv_heads=2, window=128, **options) -> AdaRotary:
    rotary = AdaRotary(len(theta0), heads, kv_heads, window, **options)
    rotary.theta0.copy_(torch.as_tensor(theta0))
    return rotary


def rope_theta(pairs: int, base: float = 500000.0) -> torch.Tensor:
    return base ** (-torch.arange(pairs).float() / pairs)


def random_qk(seed=0, length=1, dim=16):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 8, length, dim, generator=generator)
    return q, torch.randn(1, 2, length, dim, generator=generator)


positions = st.integers(0, 20_000)


@given(positions, st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_rotation_preserves_norms(position, seed):
    rotary = make(rope_theta(8))
    q, k = random_qk(seed)
    rq, rk = rotary(q, k, torch.tensor([[position]]))
    torch.testing.assert_close(rq.norm(dim=-1), q.norm(dim=-1), rtol=NORM, atol=0)
    torch.testing.assert_close(rk.norm(dim=-1), k.norm(dim=-1), rtol=NORM, atol=0)


@given(positions, st.integers(0, 4000), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_logit_depends_on_the_distance_only(position, distance, seed):
    rotary = make(rope_theta(8))
    with torch.no_grad():
        rotary.delta.copy_(0.3 * torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)))
    q, k = random_qk(seed)

    def logits(at):
        rq, _ = rotary(q, k, torch.tensor([[at + distance]]))
        _, rk = rotary(q, k, torch.tensor([[at]]))
        return (rq[0, :, 0] * rk[0, :, 0].repeat_interleave(4, 0)).sum(-1)

    torch.testing.assert_close(logits(position), logits(0), rtol=0, atol=2e-2)  # float32 angles near 24,000 rad


def test_query_heads_of_a_group_follow_their_keys_frequencies():
    """Perturb one key/value head: query heads g*r..(g+1)*r-1 move, no others (RX-01's sibling)."""
    rotary = make(rope_theta(8))
    q, k = random_qk(length=5)
    at = torch.arange(5)[None]
    before_q, before_k = rotary(q, k, at)
    with torch.no_grad():
        rotary.delta[1] += 0.5
    after_q, after_k = rotary(q, k, at)
    moved = [h for h in range(8) if not torch.equal(before_q[0, h], after_q[0, h])]
    assert moved == [4, 5, 6, 7]
    assert torch.equal(before_k[0, 0], after_k[0, 0]) and not torch.equal(before_k[0, 1], after_k[0, 1])


def test_the_scale_is_the_papers_formula():
    rotary = make(rope_theta(8), window=100)
    with torch.no_grad():
        rotary.tau.copy_(torch.linspace(0.5, 2, 8))
        rotary.gamma.copy_(torch.linspace(-2, 2, 8))
    got = rotary.scale(torch.tensor([[0, 98, 99, 100, 999]]))
    for head in range(8):
        tau, gamma = rotary.tau[head].item(), rotary.gamma[head].item()
        for i, length in enumerate((1, 99, 100, 101, 1000)):
            expected = (1 / tau) * math.log(1 + max(length, 100) / 100) ** gamma
            assert got[0, head, i].item() == pytest.approx(expected, rel=1e-5)


def test_rope_ids_scale_is_its_papers_formula():
    rotary = make(rope_theta(8), heads=1, kv_heads=1, window=100, log_coef=0.1)
    got = rotary.scale(torch.tensor([[9, 99, 799]]))[0, 0]
    assert got.tolist() == pytest.approx([1, 1, (1 + 0.1 * math.log(8)) ** 2], rel=1e-6)


def test_tau_one_and_gamma_zero_is_exactly_one_at_every_length():
    at = torch.arange(0, 2**17, 311)[None]
    assert torch.equal(make(rope_theta(8)).scale(at), torch.ones(1, 8, at.shape[1]))


def test_length_sequence_uses_the_rows_whole_length():
    rotary = make(rope_theta(8), window=4, length="sequence")
    with torch.no_grad():
        rotary.gamma.fill_(1.0)
    assert rotary.scale(torch.arange(8)[None])[0, 0].tolist() == pytest.approx([math.log(3)] * 8)


@pytest.mark.parametrize("autocast", [False, True])
def test_positions_stay_distinct_and_angles_exact_in_a_bf16_model(autocast):
    """RX-05: bf16 positions collapse 4,096 tokens onto 769 values; ours are formed in float32 or better."""
    pairs = 16
    rotary = make(rope_theta(pairs), heads=1, kv_heads=1).to(torch.bfloat16)
    assert all(t.dtype == torch.float32 for t in (rotary.theta0, rotary.delta, rotary.tau, rotary.gamma))
    at = torch.cat((torch.arange(4096), torch.arange(32768, 32801), torch.tensor([131071])))[None]
    angles = at[:, None, :, None].float() * rotary.theta()[:, None]
    exact = at[0, :, None].double() * rotary.theta0.double()
    error = (angles[0, 0].double() - exact).abs().max(0).values
    assert error[0] <= ANGLE_FAST and error[pairs // 2 :].max() <= ANGLE_SLOW
    one = torch.zeros(1, 1, at.shape[1], 2 * pairs, dtype=torch.float32)
    one[..., 0] = 1  # the fastest pair's cosine and sine come out at channels 0 and F
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        turned, _ = rotary(one, one, at)
    assert turned.dtype == torch.float32
    expected = torch.stack((exact[:, 0].cos(), exact[:, 0].sin()), -1).float()
    torch.testing.assert_close(turned[0, 0][:, [0, pairs]], expected, rtol=0, atol=ANGLE_FAST)
    assert len({tuple(x) for x in turned[0, 0, :4096].tolist()}) == 4096


def test_gradients_reach_delta_tau_and_gamma_and_match_finite_differences():
    rotary = make(rope_theta(4), heads=4, kv_heads=2, window=8)
    q = torch.randn(1, 4, 12, 8, dtype=torch.float32)
    k = torch.randn(1, 2, 12, 8, dtype=torch.float32)
    at = torch.arange(12)[None] + 5

    def loss() -> torch.Tensor:
        rq, rk = rotary(q, k, at)
        return (rq @ rk.repeat_interleave(2, 1).transpose(-1, -2)).square().mean()

    loss().backward()
    for tensor in (rotary.delta, rotary.tau, rotary.gamma):
        gradient = tensor.grad.clone()
        assert gradient.abs().min() > 0
        with torch.no_grad():
            index = (0,) * tensor.ndim
            step = 1e-2
            tensor[index] += step
            up = loss()
            tensor[index] -= 2 * step
            down = loss()
            tensor[index] += step
        assert float((up - down) / (2 * step)) == pytest.approx(float(gradient[index]), rel=2e-2)


def test_a_table_that_never_came_is_loud():
    assert AdaRotary(4, 2, 1, 16).theta().isnan().all()


def test_moving_through_the_meta_device_keeps_dtype():
    rotary = make(rope_theta(4)).to("meta").to_empty(device="cpu")
    assert rotary.theta0.dtype == torch.float32 and rotary.theta0.device.type == "cpu"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_positions_changed_in_place_are_seen(mode):
    """What layers share of a forward pass must not outlive it."""
    rotary = AdaRotary(4, 2, 1, 16)
    with torch.no_grad():
        rotary.gamma.fill_(2.0)
    with mode():
        positions = torch.tensor([[100]])
        first = rotary.scale(positions).clone()
        assert torch.equal(rotary.scale(positions), first)
        positions += 400
        assert torch.equal(rotary.scale(positions), rotary.scale(torch.tensor([[500]])))
    assert rotary.scale(positions).requires_grad


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"upcast": "throughout"}, {"log_coef": 0.1}])
def test_a_single_token_is_turned_as_in_a_longer_row(options):
    """Decoding takes q and k in one go; every head count, shared and own tables, part of the head."""
    for heads, kv, tables, pairs, turn_scale in (
        (8, 2, 2, 4, 1.0),
        (8, 2, 1, 4, 1.5),
        (4, 4, 4, 2, 1.3),
        (3, 1, 1, 4, 1.0),
    ):
        rotary = AdaRotary(pairs, 1 if tables == 1 else heads, tables, 16, turn_scale=turn_scale, **options)
        rotary.theta0.uniform_(0.1, 1)
        with torch.no_grad():
            rotary.delta.normal_()
            rotary.tau.uniform_(0.5, 2)
            q, k = torch.randn(2, heads, 5, 8), torch.randn(2, kv, 5, 8)
            positions = torch.arange(40, 45)[None]
            full = rotary(q, k, positions)
            for t in range(5):
                one = rotary(q[:, :, t : t + 1], k[:, :, t : t + 1], positions[:, t : t + 1])
                assert torch.equal(one[0], full[0][:, :, t : t + 1]) and torch.equal(one[1], full[1][:, :, t : t + 1])


@torch.no_grad()
def test_tables_that_one_layer_made_for_its_peers_are_theirs_and_never_old():
    layers = [make(rope_theta(8)) for _ in range(3)]
    for layer in layers:
        layer.delta.normal_()
        layer.gamma.normal_()
        layer.peers = layers
    q, k = random_qk()
    positions = torch.tensor([[500]])

    def alone(layer):
        with torch.enable_grad():  # the way of longer rows
            return [x.detach() for x in layer(q, k, positions.clone())]

    def same(layer):
        return all(map(torch.equal, layer(q, k, positions), alone(layer)))

    assert same(layers[0]) and same(layers[1])
    layers[2].delta += 1  # its tables were made before
    assert same(layers[2])
    assert same(layers[0])
    layers[0].gamma += 1  # the first layer of the next pass, at the same positions
    assert same(layers[0]) and same(layers[1])
    positions += 7
    assert same(layers[1]) and same(layers[2])
