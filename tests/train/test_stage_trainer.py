from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropex import attach, make_spec
from ropex.errors import RopexError
from ropex.seam import rope_of_model
from ropex.train import atomic
from ropex.train.loss import batch_loss
from ropex.train.settings import Settings, resolve
from ropex.train.stages import JOINT, WARMUP, Stage
from ropex.train.trainable import add_lora, choose, trainable, trained_state
from ropex.train.trainer import StageTrainer, Stop, parameter_groups, rate
from ropex.train.windows import Corpus, Windows, weigh_skipped


@pytest.fixture
def make(tiny_llama: Callable, tmp_path: Path) -> Callable[..., tuple[StageTrainer, list[dict[str, Any]]]]:
    """Makes a trainer for one stage on random tokens, and the list that its log lines land in."""

    def build(stage: Stage = WARMUP, dtype: torch.dtype = torch.float32, **wishes: Any) -> Any:
        settings = Settings(256, window=48, **({"steps_warmup": 3, "steps_joint": 3, "save_steps": 1} | wishes))
        settings = resolve(settings, 256, "float32")
        model = tiny_llama().to(dtype)
        attach(model, make_spec("adarope", rope_of_model(model), target=256, init="yarn"))
        if stage.lora:
            add_lora(model, 4, 4, 1)
        choose(model, stage, settings.ada_freq, settings.ada_scale)
        tokens = np.random.default_rng(0).integers(257, size=2000).astype(np.uint32)
        texts = Corpus(tokens, np.array([0]), np.array([2000]), 0, 2000, "")
        count = settings.steps(stage) * settings.samples_a_step
        windows = Windows(texts, 48, 256, settings.seed, 0, count)
        lines: list[dict[str, Any]] = []
        folder = tmp_path / f"stage-{len(list(tmp_path.iterdir()))}"
        return StageTrainer(model, stage, settings, windows, folder, lines.append, Stop(lambda text: None)), lines

    return build


def test_the_rate_rises_from_above_zero_and_falls_as_a_cosine() -> None:
    rates = [rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 5)
    assert max(rates) == rates[4] == 1
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.001
    assert rates[52] == pytest.approx(0.5, abs=0.01)
    assert rate(0, 1) == 1


def test_each_kind_has_its_rate_and_nothing_decays(make: Callable) -> None:
    trainer, _ = make(JOINT, lr_freq=0.1, lr_scale=0.2, lr_lora=0.3)
    groups = parameter_groups(trainer.model, trainer.settings)
    kinds = {id(t.parameter): t.kind for t in trainable(trainer.model)}
    assert {g["name"]: (g["lr"], {kinds[id(p)] for p in g["params"]}) for g in groups} == {
        "freq": (0.1, {"delta"}),
        "scale": (0.2, {"tau", "gamma"}),
        "lora": (0.3, {"lora_A", "lora_B"}),
    }
    assert {g["weight_decay"] for g in trainer.create_optimizer().param_groups} == {0.0}


def test_without_gradients_nothing_moves(make: Callable) -> None:
    trainer, _ = make(JOINT)
    with torch.no_grad():
        for tensor in trainable(trainer.model):
            tensor.parameter.fill_(0.7)
    before = trained_state(trainer.model)
    optimiser = trainer.create_optimizer()
    for tensor in trainable(trainer.model):
        tensor.parameter.grad = torch.zeros_like(tensor.parameter)
    optimiser.step()
    assert all(torch.equal(value, before[name]) for name, value in trained_state(trainer.model).items())


@pytest.mark.parametrize("stage", [WARMUP, JOINT])
def test_in_bfloat16_every_tensor_moves_and_stays_float32_everywhere(make: Callable, stage: Stage) -> None:
    from safetensors.torch import load_file

    trainer, _ = make(stage, torch.bfloat16, steps_warmup=20, steps_joint=20, save_steps=20, lr_scale=1e-3)
    before = {t.name: t.parameter.detach().clone() for t in trainable(trainer.model)}
    backbone = trainer.model.model.layers[0].mlp.up_proj.weight.clone()
    trainer.train()
    for tensor in trainable(trainer.model):
        assert not torch.equal(tensor.parameter, before[tensor.name]), tensor.name
        assert tensor.parameter.dtype == torch.float32
    moments = [v for s in trainer.optimizer.state.values() for v in s.values() if v.ndim]
    assert len(moments) == 2 * len(before)
    assert {m.dtype for m in moments} == {torch.float32}
    saved = load_file(trainer.folder / "checkpoint-20" / "trained.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[t.name], t.parameter) for t in trainable(trainer.model))
    assert torch.equal(trainer.model.model.layers[0].mlp.up_proj.weight, backbone)


@pytest.mark.parametrize("plain_skip", [False, True])
def test_skipped_positions_weigh_in_the_loss_unless_told_otherwise(make: Callable, plain_skip: bool) -> None:
    trainer, lines = make(steps_warmup=1, plain_skip=plain_skip)
    batch = {k: v[None] for k, v in trainer.windows[0].items()}
    assert (batch["position_ids"].diff() > 1).any()
    plain = batch_loss(trainer.model, batch, 47).item()
    mask = weigh_skipped(batch["position_ids"], batch["input_ids"], torch.float32)
    weighed = batch_loss(trainer.model, batch | {"attention_mask": mask}, 47).item()
    assert abs(plain - weighed) > 1e-4
    trainer.train()
    assert lines[0]["loss"] == pytest.approx(plain if plain_skip else weighed, abs=1e-6)


@pytest.mark.parametrize("stage", [WARMUP, JOINT])
def test_gradient_checkpointing_changes_no_gradient(make: Callable, stage: Stage) -> None:
    gradients, passes = [], []
    for on in (False, True):
        trainer, _ = make(stage)
        model = trainer.model.train()
        if stage.lora:
            with torch.no_grad():
                for tensor in trainable(model):
                    if tensor.kind == "lora_B":
                        tensor.parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        if on:
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.disable_input_require_grads()
        calls: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        batch = {k: v[None] for k, v in trainer.windows[0].items()}
        batch_loss(model, batch, 47).backward()
        gradients.append({t.name: t.parameter.grad for t in trainable(model)})
        passes.append(len(calls))
    assert passes == [1, 2]  # it did recompute
    for name, gradient in gradients[0].items():
        assert gradient.any()
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-7)


def test_accumulated_batches_train_as_one_large_batch(make: Callable) -> None:
    (one, lines), (two, more) = make(batch_size=4), make(batch_size=2, accumulation=2)
    one.train()
    two.train()
    assert [line["windows"] for line in lines] == [line["windows"] for line in more] == [[0, 3], [4, 7], [8, 11]]
    for line, other in zip(lines, more, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    other_state = trained_state(two.model)
    for name, value in trained_state(one.model).items():
        torch.testing.assert_close(value, other_state[name], rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, lines = make(steps_warmup=5)
    real = batch_loss

    def breaks(model: Any, batch: Any, items: Any) -> torch.Tensor:
        return real(model, batch, items) * (float("nan") if len(lines) == 2 else 1)

    monkeypatch.setattr("ropex.train.loss.batch_loss", breaks)
    with pytest.raises(RopexError, match="the loss is nan at step 3 of stage warmup.*checkpoint-2, is kept"):
        trainer.train()
    assert atomic.whole(trainer.folder / "checkpoint-2")
    saved = trained_state(trainer.model)
    assert all(torch.isfinite(value).all() for value in saved.values())


def test_an_infinite_gradient_stops_before_it_is_applied(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = make()
    tau = next(t.parameter for t in trainable(trainer.model) if t.kind == "tau")
    before = tau.detach().clone()
    tau.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(RopexError, match="gradient norm is (inf|nan) at step 1"):
        trainer.train()
    assert torch.equal(tau, before)


def test_only_the_newest_checkpoints_stay_and_a_damaged_one_is_known(make: Callable) -> None:
    trainer, _ = make(steps_warmup=4)
    trainer.train()
    folders = [folder for _, folder in atomic.checkpoints(trainer.folder)]
    assert [f.name for f in folders] == ["checkpoint-4", "checkpoint-3"]
    assert all(map(atomic.whole, folders))
    assert not (trainer.folder / atomic.PARTIAL).exists()
    optimiser = folders[0] / "optimizer.pt"
    content = bytearray(optimiser.read_bytes())
    content[len(content) // 2] ^= 1
    optimiser.write_bytes(content)
    assert not atomic.whole(folders[0])
    (folders[1] / "rng_state.pth").unlink()
    assert not atomic.whole(folders[1])


def test_nothing_goes_to_stdout(make: Callable, capsys: pytest.CaptureFixture) -> None:
    make()[0].train()
    assert capsys.readouterr().out == ""
