"""Processes that train together: what their launcher asked for, and the backbone in shards.

FSDP2 shards the backbone, layer by layer. The rotary tensors and LoRA, which are what most stages train, stay whole in
every process: they are float32 beside a bfloat16 backbone, layers may share them (a tensor belongs to one unit of FSDP
only), and all of them together are smaller than one layer. Their gradients are averaged once a step. So a run's files
are those of one process, and any number of processes reads them.

torch's fully_shard is called here and not by accelerate, whose units would gather the head once a chunk of the loss and
whose wrapping takes neither buffers nor the CPU. The rest of accelerate, launcher to gradient clipping, is used as is.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ropex.errors import OptionError, UnsupportedError
from ropex.seam import rope_of_model, rotaries
from ropex.train.settings import FLASH, Settings

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Devices:
    """The processes of a run. sharded: the backbone is, by FSDP2. parallelism: accelerate's, where it was asked for."""

    sharded: bool = False
    parallelism: ParallelismConfig | None = None

    @property
    def pieces(self) -> int:
        """Processes that a window's tokens are spread over (context parallelism)."""
        return self.parallelism.cp_size if self.parallelism else 1

    @property
    def readers(self) -> int:
        """Windows that are read at once: one a process, or one for all that share its tokens."""
        return int(PartialState().num_processes) // self.pieces


def launched() -> Devices:
    """What torchrun and `accelerate launch` left in the environment; the process group stands already.

    Errors: UnsupportedError for other engines, OptionError for settings of these that ropex has its own for.
    """
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        raise UnsupportedError("DeepSpeed is not supported: shard with --use_fsdp --fsdp_version 2")
    sharded = _is_on("ACCELERATE_USE_FSDP") and dist.is_initialized()
    parallelism = ParallelismConfig() if _is_on("ACCELERATE_USE_PARALLELISM_CONFIG") else None
    if parallelism and max(parallelism.tp_size, parallelism.sp_size, parallelism.dp_replicate_size) > 1:
        raise UnsupportedError("of the parallelism config, dp_shard_size and cp_size are supported: leave out the rest")
    if parallelism and not sharded:
        raise OptionError("a parallelism config needs shards: add --use_fsdp --fsdp_version 2")
    if not sharded:
        return Devices()
    wrong = [
        said
        for bad, said in (
            (os.environ.get("FSDP_VERSION", "1") != "2", "FSDP 1 is not supported: add --fsdp_version 2"),
            (_is_on("FSDP_ACTIVATION_CHECKPOINTING"), "activations are recomputed by ropex's own --grad-ckpt"),
            (_is_on("FSDP_OFFLOAD_PARAMS"), "shards on the CPU (--fsdp_offload_params) are not supported"),
            (
                os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no",
                "the backbone trains in the dtype of --dtype: leave --mixed_precision out",
            ),
        )
        if bad
    ]
    processes = PartialState().num_processes
    if parallelism and parallelism.total_size != processes:
        wrong.append(f"the parallelism config is for {parallelism.total_size} processes, and there are {processes}")
    if wrong:
        raise OptionError("; ".join(wrong))
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"  # each process reads the checkpoint, and keeps its shard
    return Devices(True, parallelism)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


def check_pieces(model: "PreTrainedModel", settings: Settings, devices: Devices) -> None:
    """Can a window be cut along its tokens? Ring attention is causal over the whole row, and knows no other mask.

    Errors: OptionError, UnsupportedError."""
    if devices.pieces == 1:
        return
    config: Any = model.config
    spec: Any = model.ropex_spec
    rope = rope_of_model(model)
    window, cuts = settings.sample_tokens, 2 * devices.pieces  # each process gets a piece from either end
    kinds = other_layers(config)
    if PartialState().device.type == "cpu":
        raise UnsupportedError("torch's ring attention has no kernel for the CPU: context parallelism needs GPUs")
    if config._attn_implementation != "sdpa":
        raise OptionError("context parallelism runs in torch's SDPA alone: give --attn sdpa")
    if model.dtype == torch.float32 and rope.heads != rope.kv_heads:
        raise OptionError("grouped heads have no ring attention in float32: give --dtype bfloat16")
    if settings.pack:
        raise OptionError("documents packed into a window need a mask, which ring attention has not: leave --pack out")
    if spec.length != "position":
        raise UnsupportedError("the scale follows a row's whole length, which a process with a piece of it cannot know")
    if kinds:
        raise UnsupportedError(f"ring attention has no mask for layers of {', '.join(sorted(kinds))}")
    if not rope.family.layer.endswith(".self_attn"):
        raise UnsupportedError(f"accelerate's context parallelism does not know the layers of {config.model_type}")
    if window % cuts:
        raise OptionError(f"a window of {window} tokens does not divide into {cuts} pieces: give a multiple of {cuts}")


def weighs_skipped(model: "PreTrainedModel", settings: Settings, pieces: int = 1) -> bool:
    """Whether, in windows whose positions jump, tokens are to stand for those skipped: by a mask, which flash and ring
    attention do not take, and for which layers with a mask of their own would lose it.

    pieces: processes that share a window's tokens."""
    asked = settings.skips and not settings.plain_skip
    return asked and settings.attn not in FLASH and pieces == 1 and not other_layers(model.config)


def other_layers(config: Any) -> set[str]:
    """The kinds of layers that do not attend to all of a row. A sliding window counts whatever layer_types says: some
    families slide by it alone."""
    slides = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    return {*slides, *(getattr(config, "layer_types", None) or [])} - {"full_attention"}


def shard(model: "PreTrainedModel") -> None:
    """Leave each process its share of the backbone, on its device; the rotary tensors stay whole. In place.

    Embeddings, final norm and head are one unit, gathered once a pass, so that the loss sees a plain head."""
    from torch.distributed.fsdp import fully_shard

    device, processes = PartialState().device, int(PartialState().num_processes)
    mesh = dist.init_device_mesh(device.type, (processes,), mesh_dim_names=("fsdp",))  # a name that peft goes by
    whole = {p for r in rotaries(model) for p in r.parameters()}
    whole |= {p for p in model.parameters() if _cut(p, processes) is None}
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    sharing: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": whole,
        "shard_placement_fn": lambda parameter: Shard(_cut(parameter, processes) or 0),
    }
    reshard = not _is_off("FSDP_RESHARD_AFTER_FORWARD")
    for layer in layers_of(model):
        fully_shard(layer, reshard_after_forward=reshard, **sharing)
    fully_shard(model, **sharing)


def layers_of(model: "PreTrainedModel") -> list[torch.nn.Module]:
    """The decoder's layers, in order."""
    layers: Any = model.get_submodule(rope_of_model(model).family.layer.partition(".{}")[0])
    return list(layers)


def _cut(parameter: torch.Tensor, processes: int) -> int | None:
    """The dimension that a tensor is cut along: the first, or one that divides evenly where a process would get no row
    of it (accelerate tells shards apart by address, and an empty one has none). None: the tensor stays whole."""
    for dim, size in enumerate(parameter.shape):
        if size % processes == 0 or (dim == 0 and -(-size // processes) * (processes - 1) < size):
            return dim
    return None


def _is_off(name: str) -> bool:
    return os.environ.get(name, "true").lower() in ("false", "0")


def own_shards(accelerator: "Accelerator") -> None:
    """Tell accelerate that the model comes in shards: it wraps nothing more, and on the CPU, where it would not know
    FSDP, does as on a GPU."""
    state: Any = accelerator.state
    state.fsdp_plugin = getattr(state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin(fsdp_version=2)
    state.fsdp_plugin.auto_wrap_policy = None
    state.distributed_type = DistributedType.FSDP


def average_gradients(model: torch.nn.Module) -> None:
    """Average over the processes what FSDP does not: gradients of tensors that every process keeps whole, in one go."""
    grads = [p.grad for p in model.parameters() if p.grad is not None and not isinstance(p, DTensor)]
    if not grads:
        return
    summed = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(summed)
    summed /= dist.get_world_size()
    for grad, mean in zip(grads, summed.split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor from its shards, in every process (each has to ask); any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's share of a whole tensor, cut as `like` is; whole where `like` is no shard."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
