"""transformers' Trainer for one stage: our loss, our rates, our checkpoints, and nothing printed."""

import contextlib
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ropex.checkpoint import TRAINED
from ropex.errors import CheckpointError, OutputError, RopexError
from ropex.train import atomic
from ropex.train.devices import Devices, average_gradients, gathered, own_shards, share, weighs_skipped
from ropex.train.loss import loss_as_forward
from ropex.train.settings import Settings
from ropex.train.stages import Stage
from ropex.train.trainable import WEIGHT, restore, spread, trainable, trained_state
from ropex.train.windows import Windows, weigh_skipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARMUP_SHARE = 0.05
MAX_GRAD_NORM = 1.0


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate at a step, from 0: a short linear rise that starts above 0, then a half cosine
    that would reach 0 one step after the last."""
    rise = max(1, round(WARMUP_SHARE * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise + 1) / (steps - rise + 1)))


def parameter_groups(model: torch.nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """One group a learning rate, and apart what is in shards, which the optimiser cannot mix with what is whole. None
    decays: a rotary tensor pulled towards 0 is another table, and LoRA is small."""
    rates = {
        "delta": settings.lr_freq,
        "tau": settings.lr_scale, "gamma": settings.lr_scale,
        "lora_A": settings.lr_lora, "lora_B": settings.lr_lora, WEIGHT: settings.lr_full,
    }  # fmt: skip
    names = {"delta": "freq", "tau": "scale", "gamma": "scale", "lora_A": "lora", "lora_B": "lora", WEIGHT: "full"}
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for tensor in trainable(model):
        group = groups.setdefault(
            (names[tensor.kind], isinstance(tensor.parameter, DTensor)),
            {"name": names[tensor.kind], "params": [], "lr": rates[tensor.kind], "weight_decay": 0.0},
        )
        group["params"].append(tensor.parameter)
    return list(groups.values())


class StageTrainer(Trainer):
    """One stage of a run, in its folder. `record` gets the log's line after every step."""

    loss_is_scaled_for_ga = True  # the loss is divided by the labels of the whole optimiser step

    def __init__(
        self,
        model: "PreTrainedModel",
        stage: Stage,
        settings: Settings,
        windows: Windows,
        folder: Path,
        record: Callable[[dict[str, Any]], None],
        stop: "Stop",
        devices: Devices | None = None,
    ) -> None:
        self.devices = devices or Devices()
        self.stage, self.settings, self.windows, self.record = stage, settings, windows, record
        self.trained, self.folder = model, folder
        self.weighs = weighs_skipped(model, settings, self.devices.pieces)
        self._began, self._rates, self._destination = 0.0, {}, folder  # type: float, dict[str, float], Path
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=settings.steps(stage),
            per_device_train_batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.accumulation,
            max_grad_norm=MAX_GRAD_NORM,
            save_strategy="steps",
            save_steps=settings.save_steps or 1,
            logging_steps=1,
            logging_nan_inf_filter=False,
            train_sampling_strategy="sequential",  # the windows are in random order already
            seed=settings.seed,
            remove_unused_columns=False,
            average_tokens_across_devices=True,
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to=settings.report_to or "none",
            log_level="error",
            log_level_replica="error",
            parallelism_config=self.devices.parallelism,
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # without this, two visible GPUs mean DataParallel
        super().__init__(model, arguments, train_dataset=windows, callbacks=[_Watch(self, stop)])

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.devices.sharded:
            own_shards(self.accelerator)
            self.is_fsdp_enabled = True

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        if num_items_in_batch is None:
            raise RuntimeError("the Trainer did not count the labels of the step")
        if self.weighs:
            mask = weigh_skipped(inputs["position_ids"], inputs["input_ids"], self.trained.dtype)
            inputs = inputs | {"attention_mask": mask}
        # `items` are the labels of all processes, whose gradients are then averaged
        loss = model(inputs, num_items_in_batch) * self.accelerator.num_processes
        if not torch.isfinite(loss):
            raise self._diverged("loss", float(loss))
        return (loss, {}) if return_outputs else loss

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.devices.sharded:
            average_gradients(self.trained)
        norm = super()._clip_grad_norm(model)
        if not math.isfinite(norm):
            raise self._diverged("gradient norm", float(norm))
        return norm

    def _diverged(self, what: str, value: float) -> RopexError:
        saved = next((str(p) for _, p in atomic.checkpoints(self.folder)), None)
        kept = f"the last checkpoint, {saved}, is kept" if saved else "there is no checkpoint yet"
        return RopexError(
            f"the {what} is {value} at step {self.state.global_step + 1} of stage {self.stage.name}: "
            f"start again with lower learning rates (--lr-freq, --lr-scale, --lr-lora, --lr-full); {kept}"
        )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(parameter_groups(self.trained, self.settings))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: rate(step, num_training_steps)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def begin_step(self) -> None:
        """Note the time and the rates of the step that starts; both have changed by the time it is logged."""
        self._began = time.perf_counter()
        self._rates = {g["name"]: g["lr"] for g in self.create_optimizer().param_groups}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand one line a step to `record`; the Trainer would add it to every checkpoint and print it to stdout."""
        if "loss" not in logs:
            return
        seconds, step = time.perf_counter() - self._began, self.state.global_step
        a_step = self.settings.samples_a_step * self.devices.readers
        first = self.windows.first + (step - 1) * a_step
        line = {
            "stage": self.stage.name,
            "step": step,
            "loss": logs["loss"],
            "tokens_per_second": a_step * self.windows.window / seconds,
            "seconds": seconds,
            "lr": self._rates,
            "grad_norm": logs["grad_norm"],
            "windows": [first, first + a_step - 1],
        } | spread(self.trained)
        if torch.cuda.is_available():
            line["peak_bytes"] = torch.cuda.max_memory_allocated()
        self.record(line)
        if self.settings.report_to:
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, _flat(line))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with loss_as_forward(self.trained):
            return super().train(*args, **kwargs)

    # --- checkpoints: everything into a folder aside, then one rename -----------------------------------------------

    def _get_output_dir(self, trial: Any = None) -> str:
        return str(self._destination)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        aside, first = self.folder / atomic.PARTIAL, self.is_world_process_zero()
        name = f"{atomic.PREFIX}{self.state.global_step}"
        if first:
            shutil.rmtree(aside, ignore_errors=True)
            with atomic.writing(aside):
                (aside / name).mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self._destination = aside
        try:
            with atomic.writing(aside / name):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()  # each process has random numbers of its own to keep
                if first:
                    atomic.seal(aside / name)
                    atomic.publish(aside / name, self.folder / name)
        except RuntimeError as error:  # what torch.save raises on a full disk
            reason = str(error).splitlines()[0]
            raise OutputError(f"{name} cannot be written ({reason}): free space and continue with --resume") from None
        finally:
            self._destination = self.folder
            if first:
                shutil.rmtree(aside, ignore_errors=True)
        if first:
            atomic.rotate(self.folder, self.settings.keep)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        first = self.is_world_process_zero()
        state = trained_state(self.trained, keep=first)
        if first:
            folder = Path(output_dir or self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_tensors(folder / TRAINED, state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.devices.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        first, state = self.is_world_process_zero(), self.create_optimizer().state_dict()
        whole: dict[int, dict[str, Any]] = {}
        for number, values in state["state"].items():
            every = {name: gathered(value) for name, value in values.items()}  # takes all processes
            whole[number] = {name: value.cpu() for name, value in every.items()} if first else {}
        if first:
            torch.save(state | {"state": whole}, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.create_scheduler(0).state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.devices.sharded or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer = self.create_optimizer()
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", mmap=True, weights_only=True)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, values in state["state"].items():
            like = parameters[number]
            values |= {k: share(v, like) if v.shape == like.shape else v for k, v in values.items()}
        optimizer.load_state_dict(state)
        schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.create_scheduler(0).load_state_dict(schedule)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(resume_from_checkpoint) / TRAINED
        try:
            restore(self.trained, load_file(path), str(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): delete its folder and resume again") from None


class _Watch(TrainerCallback):
    """Times the steps, and ends the stage after the step in which a signal came."""

    def __init__(self, trainer: StageTrainer, stop: "Stop") -> None:
        self.trainer, self.stop = trainer, stop

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._anyone_asked():
            control.should_save = control.should_training_stop = True

    def _anyone_asked(self) -> bool:
        """A signal may reach one process a step before the other, and all have to end after the same one."""
        if self.trainer.accelerator.num_processes == 1:
            return self.stop.asked
        flag = torch.tensor([self.stop.asked], device=self.trainer.accelerator.device, dtype=torch.int32)
        return bool(self.trainer.accelerator.reduce(flag, "sum").item())


def _flat(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log line, for trackers that draw them."""
    flat = {k: v for k, v in line.items() if isinstance(v, int | float)}
    flat |= {f"lr/{name}": rate for name, rate in line["lr"].items()}
    for kind in ("tau", "gamma", "|delta|"):
        flat |= {f"{kind}/{part}": v for part, v in zip(("min", "median", "max"), line.get(kind, ()), strict=False)}
    return flat


class Stop:
    """While entered, SIGTERM and the first Ctrl-C ask for a stop after the current step; a second Ctrl-C interrupts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked, self._say, self._before = False, say, {}  # type: bool, Callable[[str], None], dict[int, Any]

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # Python takes handlers from no other
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of another write to stderr
            self._say("stopping after this step; a checkpoint will be written")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
