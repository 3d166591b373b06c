import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from families import tiny

from ropex.families import FAMILIES
from ropex.train.loss import IGNORED, batch_loss, chunk_tokens, summed_nll


def make_batch(
    rows: int, length: int, labels: int | None = None, seed: int = 0, vocabulary: int = 257
) -> dict[str, torch.Tensor]:
    """Random tokens; only the last `labels` of each row count."""
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    wanted = ids.clone()
    if labels is not None:
        wanted[:, : length - labels] = IGNORED
    return {
        "input_ids": ids,
        "labels": wanted,
        "position_ids": torch.arange(length).expand(rows, -1),
        "attention_mask": torch.ones_like(ids),
    }


def items(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [7, 16, 1000])
def test_loss_and_every_gradient_equal_those_of_the_full_logits(tiny_llama: Callable, chunk: int) -> None:
    batch = make_batch(3, 41, labels=30)
    ours, plain = tiny_llama(), tiny_llama()
    loss = batch_loss(ours, batch, items(batch), chunk)
    loss.backward()
    logits = plain(batch["input_ids"], position_ids=batch["position_ids"]).logits
    reference = F.cross_entropy(logits[:, :-1].reshape(-1, 257), batch["labels"][:, 1:].reshape(-1))
    reference.backward()
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-5)
    theirs = gradients(plain)
    assert len(theirs) == len(list(plain.parameters()))
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, theirs.pop(name), rtol=1e-5, atol=1e-5)
    assert not theirs


def test_targets_that_came_shifted_give_the_same_loss(tiny_llama: Callable) -> None:
    model, batch = tiny_llama(), make_batch(2, 41, labels=30)
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    ours = batch_loss(model, batch | {"shift_labels": shifted}, items(batch), 16)
    torch.testing.assert_close(ours, batch_loss(model, batch, items(batch), 16), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", list(FAMILIES))
@torch.no_grad()
def test_the_loss_is_that_of_the_logits_of_every_family(name: str) -> None:
    """Some scale or cap their logits after the head."""
    model, batch = tiny(name), make_batch(2, 33, vocabulary=97)
    for factor in ("logits_scaling", "logit_scale", "final_logit_softcapping"):
        if getattr(model.config, factor, None):
            setattr(model.config, factor, 3.0)
            if hasattr(model, factor):
                setattr(model, factor, 3.0)
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    reference = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(batch_loss(model, batch, items(batch), 16), reference, rtol=1e-5, atol=1e-5)


def test_a_batch_without_labels_gives_zero_and_no_nan(tiny_llama: Callable) -> None:
    model, batch = tiny_llama(), make_batch(1, 20, labels=0)
    loss = batch_loss(model, batch, items(batch), 8)
    loss.backward()
    assert loss == 0
    assert all(g.isfinite().all() and not g.any() for g in gradients(model).values())


def test_uneven_micro_batches_add_up_to_one_batch_weighted_by_tokens(tiny_llama: Callable) -> None:
    few, many = make_batch(1, 60, labels=5, seed=1), make_batch(1, 60, labels=59, seed=2)
    both = {k: torch.cat((few[k], many[k])) for k in few}
    apart, together = tiny_llama(), tiny_llama()
    total = items(few) + items(many)
    summed = torch.zeros(())
    for batch in (few, many):
        loss = batch_loss(apart, batch, total, 16)
        loss.backward()
        summed += loss.detach()
    one = batch_loss(together, both, total, 16)
    one.backward()
    torch.testing.assert_close(summed, one.detach(), rtol=1e-5, atol=1e-5)
    expected = gradients(together)
    for name, gradient in gradients(apart).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    mean_of_means = sum(batch_loss(apart, b, items(b), 16).detach() for b in (few, many)) / 2
    assert abs(mean_of_means - one.detach()) > 1e-3  # the wrong weighting would be seen


def test_no_more_logits_than_a_chunk_ever_exist() -> None:
    vocabulary, chunk = 5000, 16
    head = torch.nn.Linear(32, vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(1, 400, 32, requires_grad=True)
    rows, kept = [], []
    head.register_forward_hook(lambda module, args, out: rows.append(out.shape[0]))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = summed_nll(hidden, torch.randint(vocabulary, (1, 400)), head, chunk)
    assert max(kept) <= head.weight.numel()  # what waits for the backward pass holds no logits of the window
    forward = len(rows)
    loss.backward()
    assert len(rows) == 2 * forward  # each chunk's logits are made again
    assert max(rows) == chunk


def test_the_reduction_is_float32_for_a_bfloat16_model() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 300, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    hidden, targets = torch.randn(1, 2000, 32, dtype=torch.bfloat16), torch.randint(300, (1, 2000))
    ours = summed_nll(hidden, targets, head, 128)
    exact = F.cross_entropy(head(hidden)[0].double(), targets[0], reduction="sum")
    assert ours.dtype == torch.float32
    assert abs(float(ours) / float(exact) - 1) < 1e-5


def test_a_chunk_is_bounded_in_logits_and_never_empty() -> None:
    assert chunk_tokens(128_256) * 128_256 * 4 <= 64 * 2**20
    assert chunk_tokens(10**9) == 16


@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_loss_is_the_chunked_one(bias: bool) -> None:
    """liger-kernel itself, on the CPU by Triton's interpreter, which has to be asked for before any import."""
    pytest.importorskip("liger_kernel")
    script = f"""
import torch
from ropex.train.loss import IGNORED, fused_nll, summed_nll
torch.manual_seed(0)
head = torch.nn.Linear(32, 300, bias={bias}).requires_grad_(False)
targets = torch.randint(300, (2, 50))
targets[0, :10] = IGNORED
states = torch.randn(2, 50, 32)
found = []
for loss in (lambda s: fused_nll(s, targets, head), lambda s: summed_nll(s, targets, head, 16)):
    leaf = states.clone().requires_grad_()
    total = loss(leaf)
    (total / 7).backward()
    found.append((total.detach(), leaf.grad))
for one, other in zip(*found):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
assert found[0][0] > 400
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
