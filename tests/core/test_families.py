"""The first family's tests of the seam, over all of them."""

import pytest
import torch
from families import tiny
from tolerances import LOGITS
from transformers import MistralConfig, Qwen2Config

from ropex import attach
from ropex.families import FAMILIES
from ropex.seam import rope_of_model, rotaries
from ropex.spec import make_spec
from ropex.train.devices import other_layers, weighs_skipped
from ropex.train.settings import Settings
from ropex.train.windows import weigh_skipped

families = pytest.mark.parametrize("name", list(FAMILIES))


def convert(model, method="adarope", **asked):
    return attach(model, make_spec(method, rope_of_model(model), **asked))


@families
@torch.no_grad()
def test_a_fresh_adarope_is_its_parent_exactly(name, tokens):
    model = tiny(name)
    parent = model(tokens).logits
    assert torch.isfinite(parent).all() and parent.std() > 1e-2
    assert torch.equal(convert(model)(tokens).logits, parent)


@families
@torch.no_grad()
def test_every_layer_that_turns_is_converted_and_no_other(name, tokens):
    model = convert(tiny(name))
    rope = rope_of_model(model)
    found = [m.layer_idx for m in model.modules() if hasattr(m, "adarope")]
    assert found == list(rope.turning) and len(rotaries(model)) == len(found) > 0
    assert rope.rotary_dim == (8 if rope.family.partial not in (None, 1.0) else 16)
    before = model(tokens).logits
    for rotary in rotaries(model):
        rotary.delta.add_(0.5)
    assert (model(tokens).logits - before).abs().max() > 100 * LOGITS


def stepwise(model, ids, chunks):
    """Logits of ids [B, T] computed with a cache, `chunks` tokens at a time."""
    out, cache, at = [], None, 0
    for size in chunks:
        result = model(ids[:, at : at + size], use_cache=True, **({} if cache is None else {"cache": cache}))
        cache, at = result.cache, at + size
        out.append(result.logits)
    return torch.cat(out, 1)


@families
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(name, tokens, stir):
    """RX-18, O2: every head's frequencies and scale far from the identity, past the window and past a sliding one."""
    model = tiny(name)
    ways = ([160] + [1] * 40, [64, 136])

    def difference(chunks):
        return (stepwise(model, tokens, chunks) - model(tokens, use_cache=False).logits).abs().max()

    parents = [difference(chunks) for chunks in ways]  # Qwen3-Next's linear attention has a recurrence of its own
    stir(convert(model))
    for chunks, own in zip(ways, parents, strict=True):
        assert difference(chunks) <= LOGITS + own <= 3 * LOGITS


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "gemma2"])  # which has no sdpa: it caps its logits
@torch.no_grad()
def test_eager_equals_sdpa(name, tokens, stir):
    outs = []
    for implementation in ("eager", "sdpa"):
        model = tiny(name)
        model.set_attn_implementation(implementation)
        stir(convert(model))
        outs.append(model(tokens).logits)
    assert (outs[0] - outs[1]).abs().max() <= LOGITS


@families
@torch.no_grad()
def test_left_padding_equals_the_unpadded_row(name, tokens, stir):
    model, pad = convert(tiny(name)), 37
    stir(model)
    padded = torch.cat((torch.zeros(1, pad, dtype=torch.long), tokens[:1, :-pad]), 1)
    mask = torch.ones_like(padded)
    mask[0, :pad] = 0
    got = model(padded, attention_mask=mask).logits[0, pad:]
    assert (got - model(tokens[:1, :-pad]).logits[0]).abs().max() <= LOGITS


@families
def test_gradients_reach_every_learned_part(name, tokens):
    model = convert(tiny(name))
    model(tokens[:1, :160], labels=tokens[:1, :160]).loss.backward()
    for rotary in rotaries(model):
        for part in (rotary.delta, rotary.tau, rotary.gamma):
            assert part.grad is not None and part.grad.abs().max() > 0


@families
@torch.no_grad()
def test_a_fresh_adarope_in_bfloat16_is_its_parent_exactly(name, tokens):
    """Olmo rotates in float32, Cohere in float32 by cosines that were rounded first, the others in their own dtype."""
    model = tiny(name)
    for parameter in model.parameters():  # model.to(bfloat16) would round the parent's own table
        parameter.data = parameter.data.bfloat16()
    parent = model(tokens).logits
    assert torch.equal(convert(model)(tokens).logits, parent)


def test_a_sliding_window_counts_whatever_the_layer_types_say():
    """Mistral slides by its window alone; Qwen2 has none where it does not slide."""
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    assert other_layers(MistralConfig(sliding_window=16, **layers)) == {"sliding_attention"}
    assert not other_layers(MistralConfig(sliding_window=None, **layers))
    assert not other_layers(Qwen2Config(sliding_window=16, use_sliding_window=False, **layers))


@families
@torch.no_grad()
def test_a_row_with_skipped_positions_can_be_read_with_weights(name, tokens):
    """As in training: the mask with weights is taken as it is, by families whose layers attend to the whole row."""
    model = convert(tiny(name))
    if other_layers(model.config):
        assert not weighs_skipped(model, Settings(4096, window=tokens.shape[1]))
        return
    assert weighs_skipped(model, Settings(4096, window=tokens.shape[1]))
    assert not weighs_skipped(model, Settings(4096, window=tokens.shape[1], attn="flash_attention_2"))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).clone()
    ones = torch.ones_like(tokens)

    def logits(mask):
        return model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits

    torch.testing.assert_close(logits(weigh_skipped(positions, tokens, model.dtype)), logits(ones), rtol=0, atol=LOGITS)
    half = tokens.shape[1] // 2
    positions[:, half:] += 1000
    change = (logits(weigh_skipped(positions, tokens, model.dtype)) - logits(ones)).abs().amax((0, 2))
    assert change[:half].max() < LOGITS < 10 * LOGITS < change[half:].min()
