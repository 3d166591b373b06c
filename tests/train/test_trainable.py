import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ropex import attach, make_spec
from ropex.errors import CheckpointError, OptionError, RopexError
from ropex.lora import merge_into
from ropex.rotary import AdaRotary
from ropex.seam import rope_of_model, rotaries
from ropex.train.loss import batch_loss
from ropex.train.stages import JOINT, WARMUP
from ropex.train.trainable import (
    add_lora,
    check_gradients,
    choose,
    counts,
    lora_matrices,
    restore,
    trainable,
    trained_state,
)

BATCH = {
    "input_ids": torch.randint(257, (1, 48), generator=torch.Generator().manual_seed(3)),
    "position_ids": torch.arange(48)[None] * 4,
    "attention_mask": torch.ones(1, 48, dtype=torch.long),
}
BATCH["labels"] = BATCH["input_ids"]


def loss_of(model: Any) -> Callable[[], torch.Tensor]:
    return lambda: batch_loss(model, BATCH, 47)


@pytest.fixture
def converted(tiny_llama: Callable) -> Callable[..., Any]:
    """Makes a converted model, in a stage: its LoRA is there in the second."""

    def make(stage: Any = WARMUP, dtype: torch.dtype = torch.float32, **choices: bool) -> Any:
        model = tiny_llama().to(dtype)
        sharing = {"share_heads": choices.pop("share_heads", False)}
        attach(model, make_spec("adarope", rope_of_model(model), target=256, init="yarn", **sharing))
        if stage.lora:
            add_lora(model, 4, 8, 1)
        choose(model, stage, **({"ada_freq": True, "ada_scale": True} | choices))
        return model.train()

    return make


def test_the_warmup_trains_the_rotary_tensors_and_nothing_else(converted: Callable) -> None:
    tensors = trainable(converted())
    assert sorted(t.name for t in tensors) == sorted(
        f"model.layers.{n}.self_attn.adarope.{kind}" for n in (0, 1) for kind in ("delta", "tau", "gamma")
    )
    assert counts(tensors) == {
        "delta": {"tensors": 2, "numbers": 2 * 2 * 8},
        "tau": {"tensors": 2, "numbers": 2 * 8},
        "gamma": {"tensors": 2, "numbers": 2 * 8},
    }


def test_the_joint_stage_trains_them_with_lora_on_query_and_key(converted: Callable) -> None:
    tensors = trainable(converted(JOINT))
    lora = sorted(t.name for t in tensors if t.kind.startswith("lora"))
    assert lora == sorted(
        f"model.layers.{n}.self_attn.{projection}.{matrix}"
        for n in (0, 1) for projection in ("q_proj", "k_proj") for matrix in ("lora_A", "lora_B")
    )  # fmt: skip
    assert {k: v["numbers"] for k, v in counts(tensors).items()} == {
        "delta": 32, "tau": 16, "gamma": 16,
        "lora_A": 2 * 2 * 4 * 128, "lora_B": 2 * 4 * (128 + 32),
    }  # fmt: skip


def test_the_switches_leave_their_part_frozen(converted: Callable) -> None:
    assert set(counts(trainable(converted(ada_freq=False)))) == {"tau", "gamma"}
    assert set(counts(trainable(converted(ada_scale=False)))) == {"delta"}


def test_pairs_that_do_not_turn_once_within_the_target_keep_their_frequency_unless_all_are_asked_for(
    converted: Callable,
) -> None:
    for all_pairs in (False, True):
        model = converted(all_pairs=all_pairs)
        loss_of(model)().backward()
        for rotary in rotaries(model):
            slow = rotary.theta0 * 256 < 2 * math.pi
            assert 0 < slow.sum() < len(slow)
            assert rotary.delta.grad[:, ~slow].abs().min() > 0
            assert rotary.delta.grad[:, slow].any() == all_pairs


def test_what_is_trained_is_float32_beside_a_bfloat16_backbone(converted: Callable) -> None:
    model = converted(JOINT, torch.bfloat16)
    assert model.model.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.bfloat16
    assert {t.parameter.dtype for t in trainable(model)} == {torch.float32}
    loss_of(model)().backward()
    assert {t.parameter.grad.dtype for t in trainable(model)} == {torch.float32}


def test_lora_starts_from_its_seed_whatever_was_drawn_before(tiny_llama: Callable) -> None:
    first, second, other = tiny_llama(), tiny_llama(), tiny_llama()
    add_lora(first, 4, 4, 7)
    torch.rand(3)
    before = torch.get_rng_state()
    add_lora(second, 4, 4, 7)
    assert torch.equal(before, torch.get_rng_state())
    add_lora(other, 4, 4, 8)
    for (_, a, b), (_, same, _), (_, different, _) in zip(*map(lora_matrices, (first, second, other)), strict=True):
        assert torch.equal(a, same)
        assert not torch.equal(a, different)
        assert not b.any()


@pytest.mark.parametrize("stage", [WARMUP, JOINT])
@pytest.mark.parametrize("share_heads", [False, True])
def test_the_gradient_check_passes_and_leaves_no_trace(converted: Callable, stage: Any, share_heads: bool) -> None:
    model = converted(stage, share_heads=share_heads)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    check_gradients(model, loss_of(model))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_a_tensor_without_gradient_is_named(converted: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted()
    cut = rotaries(model)[1]
    theta = AdaRotary.theta
    monkeypatch.setattr(AdaRotary, "theta", lambda self: theta(self).detach() if self is cut else theta(self))
    with pytest.raises(RopexError, match=r"no gradient reaches model\.layers\.1\.self_attn\.adarope\.delta\."):
        check_gradients(model, loss_of(model))


def test_lora_that_nothing_flows_through_is_named(converted: Callable) -> None:
    model = converted(JOINT)
    model.model.layers[0].self_attn.k_proj._disable_adapters = True
    with pytest.raises(RopexError, match=r"layers\.0\.self_attn\.k_proj\.lora_A, .*k_proj\.lora_B"):
        check_gradients(model, loss_of(model))


def test_a_gradient_of_zero_and_one_that_is_not_finite_are_named(converted: Callable) -> None:
    model = converted()
    with torch.no_grad():
        rotaries(model)[0].theta0.zero_()
    with pytest.raises(RopexError, match=r"of zero reaches model\.layers\.0\.self_attn\.adarope\.delta\."):
        check_gradients(model, loss_of(model))
    model = converted()
    with pytest.raises(RopexError, match="not finite"):
        check_gradients(model, lambda: loss_of(model)() * float("nan"))


def test_nothing_to_train_is_an_error(converted: Callable) -> None:
    model = converted(ada_freq=False, ada_scale=False)
    with pytest.raises(OptionError, match="nothing to train"):
        check_gradients(model, loss_of(model))


def test_a_trained_state_goes_back_where_it_came_from(converted: Callable) -> None:
    model, fresh = converted(JOINT), converted(JOINT)
    with torch.no_grad():
        for tensor in trainable(model):
            tensor.parameter.add_(torch.randn_like(tensor.parameter))
    state = trained_state(model)
    assert {t.dtype for t in state.values()} == {torch.float32}
    restore(fresh, state, "here")
    for mine, theirs in zip(trainable(model), trainable(fresh), strict=True):
        assert torch.equal(mine.parameter, theirs.parameter)


@pytest.mark.parametrize("lost", ["tau", "lora_B"])
def test_a_state_that_lacks_a_tensor_is_refused(converted: Callable, lost: str) -> None:
    model = converted(JOINT)
    state = trained_state(model)
    gone = next(name for name in state if name.endswith(lost))
    del state[gone]
    with pytest.raises(CheckpointError, match=gone):
        restore(model, state, "here")


def test_the_stored_matrices_merge_into_what_the_live_model_computes(converted: Callable, tiny_llama: Callable) -> None:
    live = converted(JOINT)
    with torch.no_grad():
        for _, _, b in lora_matrices(live):
            b.normal_(0, 0.1)
    plain = tiny_llama()
    attach(plain, live.ropex_spec)
    lora = {n: t for n, t in trained_state(live).items() if "lora" in n}
    before = loss_of(plain)()
    merge_into(plain, lora, 8 / 4)
    torch.testing.assert_close(loss_of(plain)(), loss_of(live)(), rtol=1e-5, atol=1e-5)
    assert abs(loss_of(plain)() - before) > 1e-3
