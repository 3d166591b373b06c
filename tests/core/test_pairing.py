import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropex.pairing import head_permutation, repeat_heads
from ropex.rotary import rotate


def test_golden_maps_at_head_dim_8():
    """Head_dim 4 would prove nothing: both directions coincide there."""
    assert head_permutation("half-split", "interleaved", 8, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert head_permutation("interleaved", "half-split", 8, 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_channels_beyond_the_rotary_span_stay():
    assert head_permutation("half-split", "interleaved", 12, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11]


shapes = st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([8, 12, 16]), st.sampled_from([2, 4, 8]))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(shapes, dtypes, st.booleans(), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_there_and_back_is_bit_exact(shape, dtype, bias, seed):
    heads, head_dim, rotary_dim = shape
    size = (heads * head_dim,) if bias else (heads * head_dim, 5)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    there = weight[repeat_heads(head_permutation("half-split", "interleaved", head_dim, rotary_dim), heads)]
    back = there[repeat_heads(head_permutation("interleaved", "half-split", head_dim, rotary_dim), heads)]
    assert torch.equal(back, weight)
    assert torch.equal(there.reshape(-1).sort()[0], weight.reshape(-1).sort()[0])


@given(shapes, st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_permuted_channels_under_the_other_pairing_are_the_same_rotation(shape, seed):
    """The independent check: rotating interleaved the permuted vector equals permuting the half-split rotation."""
    _, head_dim, rotary_dim = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, 7, head_dim, generator=generator)
    angles = torch.rand(1, 1, 7, rotary_dim // 2, generator=generator) * 6
    index = head_permutation("half-split", "interleaved", head_dim, rotary_dim)
    half = rotate(x, angles.cos(), angles.sin())
    interleaved = rotate(x[..., index], angles.cos(), angles.sin(), interleaved=True)
    assert torch.equal(interleaved, half[..., index])
