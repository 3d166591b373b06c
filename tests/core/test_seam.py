import copy

import pytest
import torch
from tolerances import LOGITS, STOCK
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from ropex import attach, method_of
from ropex.errors import UnsupportedError
from ropex.seam import load_rotary_state, rope_of_model, rotaries, rotary_state
from ropex.spec import make_spec

HEADS = [(8, 2), (8, 8), (8, 1), (9, 3), (4, 2), (14, 2)]


def convert(model, name="adarope", **asked):
    return attach(model, make_spec(name, rope_of_model(model), **asked))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adarope_is_its_parent_bit_for_bit(make_model, tokens, heads, kv_heads, dtype):
    model = make_model(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * 8)
    for (
        parameter
    ) in model.parameters():  # model.to(bfloat16) would round the parent's own table, from_pretrained does not
        parameter.data = parameter.data.to(dtype)
    parent = model(tokens).logits
    assert torch.equal(convert(model)(tokens).logits, parent)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_yarn_init_is_transformers_own_yarn(model, make_model, make_config, tokens, implementation):
    block = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    stock = LlamaForCausalLM(make_config(rope_parameters=block, attn_implementation=implementation)).eval()
    stock.load_state_dict(model.state_dict())
    converted = convert(make_model(attn_implementation=implementation), init="yarn", factor=4.0)
    ours, theirs, base = converted(tokens).logits, stock(tokens).logits, model(tokens).logits
    assert (ours - theirs).abs().max() <= STOCK < (ours - base).abs().max()


def test_a_model_that_is_not_converted_is_untouched(model, make_model, tokens, stir):
    before = model(tokens).logits
    other = convert(make_model(seed=0))
    stir(other)
    assert not torch.equal(other(tokens).logits, before)
    assert torch.equal(model(tokens).logits, before)
    assert not rotaries(model)


def test_a_copy_of_a_converted_model_has_heads_of_its_own(model, tokens, stir):
    convert(model)
    twin = copy.deepcopy(model)
    stir(twin)
    assert not torch.equal(model(tokens).logits, twin(tokens).logits)


def test_an_architecture_that_the_seam_does_not_know_is_refused_by_name():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    with pytest.raises(UnsupportedError, match="'gpt2' is not supported"):
        rope_of_model(model)


def test_converting_twice_is_refused(model):
    convert(model)
    with pytest.raises(UnsupportedError, match="converted already"):
        convert(model)


def step_by_step(model, ids, chunks):
    """Logits of ids [B, T] computed with a cache, `chunks` tokens at a time."""
    out, cache, at = [], None, 0
    for size in chunks:
        kwargs = {} if cache is None else {"cache": cache}
        result = model(ids[:, at : at + size], use_cache=True, **kwargs)
        cache, at = result.cache, at + size
        out.append(result.logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("chunks", [[1] * 200, [64, 136], [100] + [1] * 100, [128, 1, 71]])
@torch.no_grad()
def test_cached_decoding_and_chunked_prefill_equal_the_full_forward(make_model, tokens, stir, implementation, chunks):
    """RX-18, O2: at every position, with every head's frequencies and scale far from the identity."""
    model = convert(make_model(attn_implementation=implementation))
    stir(model)
    full = model(tokens, use_cache=False).logits
    assert (step_by_step(model, tokens, chunks) - full).abs().max() <= LOGITS


@torch.no_grad()
def test_eager_equals_sdpa(make_model, tokens, stir):
    outs = []
    for implementation in ("eager", "sdpa"):
        model = convert(make_model(attn_implementation=implementation))
        stir(model)
        outs.append(model(tokens).logits)
    assert (outs[0] - outs[1]).abs().max() <= LOGITS


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_left_padding_equals_the_unpadded_row(make_model, tokens, stir, implementation):
    model = convert(make_model(attn_implementation=implementation))
    stir(model)
    pad = 37
    padded = torch.cat((torch.zeros(1, pad, dtype=torch.long), tokens[:1, :-pad]), 1)
    batch = torch.cat((padded, tokens[1:]))
    mask = torch.ones_like(batch)
    mask[0, :pad] = 0
    got = model(batch, attention_mask=mask).logits
    assert (got[0, pad:] - model(tokens[:1, :-pad]).logits[0]).abs().max() <= LOGITS
    assert (got[1] - model(tokens[1:]).logits[0]).abs().max() <= LOGITS


@torch.no_grad()
def test_generation_with_left_padding_equals_generation_alone(make_model, tokens, stir):
    model = convert(make_model())
    stir(model)
    short, long = tokens[:1, :50], tokens[1:, :90]
    batch = torch.cat((torch.cat((torch.zeros(1, 40, dtype=torch.long), short), 1), long))
    mask = torch.ones_like(batch)
    mask[0, :40] = 0
    options = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False, "pad_token_id": 0}
    together = model.generate(batch, attention_mask=mask, **options)[:, 90:]
    assert torch.equal(together[0], model.generate(short, attention_mask=torch.ones_like(short), **options)[0, 50:])
    assert torch.equal(together[1], model.generate(long, attention_mask=torch.ones_like(long), **options)[0, 90:])


@pytest.mark.parametrize("offset", [1, 1000, 5000])
@torch.no_grad()
def test_a_constant_added_to_all_positions_changes_nothing_without_adascale(make_model, tokens, stir, offset):
    model = convert(make_model())
    stir(model)
    for rotary in rotaries(model):
        rotary.gamma.zero_()
    at = torch.arange(tokens.shape[1])[None]
    mask = torch.ones_like(tokens)
    plain = model(tokens, position_ids=at, attention_mask=mask).logits
    moved = model(tokens, position_ids=at + offset, attention_mask=mask).logits
    assert (moved - plain).abs().max() <= LOGITS


@torch.no_grad()
def test_the_scale_multiplies_the_architectures_own_exactly_once(make_model, tokens):
    """tau = 1/2 on every head is the parent with q doubled."""
    model, doubled = convert(make_model()), make_model()
    for rotary in rotaries(model):
        rotary.tau.fill_(0.5)
    for layer in doubled.model.layers:
        layer.self_attn.q_proj.weight.mul_(2)
    assert (model(tokens).logits - doubled(tokens).logits).abs().max() <= LOGITS


def test_shared_heads_are_one_set_of_parameters_for_the_whole_model(model):
    convert(model, share_heads=True)
    names = [n for n, _ in model.named_parameters() if ".adarope." in n]
    assert len(names) == 3 and rotaries(model)[0].delta is rotaries(model)[2].delta


@pytest.mark.parametrize("switches", [{"ada_freq": False}, {"ada_scale": False}, {}])
def test_the_ablation_switches_decide_what_is_trained(model, switches):
    convert(model, **switches)
    on = {n.rpartition(".")[2] for n, p in model.named_parameters() if ".adarope." in n and p.requires_grad}
    assert on == ({"delta"} if switches.get("ada_freq", True) else set()) | (
        {"tau", "gamma"} if switches.get("ada_scale", True) else set()
    )


def test_smollm2s_geometry_adds_3420_parameters(make_model):
    model = make_model(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, head_dim=64, num_hidden_layers=30)
    convert(model)
    assert sum(p.numel() for n, p in model.named_parameters() if ".adarope." in n) == 3420


def test_casting_the_model_leaves_rotary_tensors_in_float32(model, stir):
    convert(model)
    stir(model)
    before = rotary_state(model)
    model.to(torch.bfloat16)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    after = {n: t for n, t in model.state_dict().items() if ".adarope." in n}
    assert set(after) == set(before) and all(torch.equal(after[n], before[n]) for n in before)


@pytest.mark.parametrize("fault", ["missing", "shape", "dtype", "extra", "nan"])
def test_rotary_tensors_that_do_not_fit_are_refused_by_name(model, fault):
    from ropex.errors import CheckpointError

    convert(model)
    state = rotary_state(model)
    name = "model.layers.1.self_attn.adarope.delta"
    if fault == "missing":
        del state[name]
    elif fault == "shape":
        state[name] = state[name][:1]
    elif fault == "dtype":
        state[name] = state[name].bfloat16()
    elif fault == "nan":
        state[name][0, 0] = torch.nan
    else:
        name = "model.layers.9.self_attn.adarope.delta"
        state[name] = torch.zeros(2, 8)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_rotary_state(model, state, "here")


def test_method_of_names_what_is_attached(model, make_model):
    assert method_of(model) == "rope"
    assert method_of(convert(model, "yarn", factor=2.0)) == "yarn"
    assert method_of(convert(make_model(), "rope-id")) == "rope-id"


def test_flash_attention_is_not_told_of_jumps_that_only_move_forward(model, tokens):
    """It reads a jump in the positions as a new document and would cut the window at every skip."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def flash_like(module, *args, position_ids=None, **kwargs):
        seen.append(position_ids)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("flash_like", flash_like)
    convert(model)
    model.config._attn_implementation = "flash_like"
    skip = torch.cat((torch.arange(100), torch.arange(100) + 5000))[None]
    packed = torch.cat((torch.arange(100), torch.arange(100)))[None]
    model(tokens[:1], position_ids=skip)
    assert seen and all(p is None for p in seen)
    seen.clear()
    model(tokens[:1], position_ids=packed)
    assert all(torch.equal(p, packed) for p in seen)


def test_a_converted_model_is_not_saved_as_its_plain_parent(model, tmp_path):
    """RX-03: transformers would write what its own loader reads as the parent."""
    convert(model)
    with pytest.raises(UnsupportedError, match="ropex export"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_beams_keep_their_own_positions(make_model, tokens, stir):
    """RX-18: a batch of rows of different lengths, three beams each, against each row alone."""
    model, pad = convert(make_model()), 23
    stir(model)
    rows = [tokens[0, : 60 - pad], tokens[1, :60]]
    batch = torch.stack((torch.cat((torch.zeros(pad, dtype=torch.long), rows[0])), rows[1]))
    mask = torch.ones_like(batch)
    mask[0, :pad] = 0
    asked = {"num_beams": 3, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    together = model.generate(batch, attention_mask=mask, **asked)[:, 60:]
    for row, got in zip(rows, together, strict=True):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **asked)[0, len(row) :]
        assert torch.equal(got, alone)
