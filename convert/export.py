"""export: what a run trained, merged into a checkpoint that other tools load."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropex.checkpoint import RUN, is_run, locate, run_source
from ropex.config import ADAROPE, Rope, read_json, rope_of, write_rope
from ropex.convert.modeling import adarope_config, write_modeling
from ropex.convert.output import PROVENANCE, check_output, provenance, whole_folder, write_json
from ropex.convert.source import Source, every, open_source, parse_size, raise_tokenizer_limit
from ropex.convert.weights import write_shards
from ropex.errors import CheckpointError, OptionError, UnsupportedError
from ropex.spec import RotarySpec, spec_of
from ropex.tables import method

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Trained:
    """What is exported: a source, the spec, the rotary tensors of every layer, and LoRA as {module: [(A, B, scale)]}:
    one entry a run, where a run was trained on another."""

    source: Source
    spec: RotarySpec | None
    rotary: Tensors
    lora: dict[str, list[tuple["torch.Tensor", "torch.Tensor", float]]]


def export(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    bake_length: int | None = None,
    scale: bool = True,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a run of `ropex extend` (or a converted checkpoint) as a merged safetensors checkpoint.

    Per-head heads export with one modeling file (trust_remote_code, ropex not needed); one table for all heads exports
    as a stock config. A scale that grows with the length has no stock form: bake_length=N folds its value at N tokens
    into q, scale=False drops it; without either such an export is refused. dtype: cast every weight but the rotary
    tensors; as stored by default. LoRA is summed in float32 and cast once.
    Returns {"out", "format", "parameters", "merged", "dtype", "target", "notes"}.
    """
    out = Path(out)
    check_output(out, [locate(run)], overwrite)
    limit = parse_size(max_shard_size)
    if bake_length is not None and not scale:
        raise OptionError("--bake-length and --no-scale exclude each other: give one")
    trained = open_trained(run)
    src, spec = trained.source, trained.spec
    check_output(out, [locate(run), src.path], overwrite)
    cast = _torch_dtype(dtype)
    rope = rope_of(src.config)
    plan = _plan(trained, rope, bake_length, scale)
    written: dict[str, int] = {"parameters": 0, "merged": 0}
    with whole_folder(out, [src.path], overwrite, src.bytes) as staging:
        tensors = _merged_tensors(trained, rope, plan.query_scale, cast, written)
        metadata = src.checkpoint.metadata if src.checkpoint else {}
        write_shards(_then(tensors, plan.rotary), staging, limit, metadata)
        if plan.rotary:
            write_modeling(staging, rope.family)
        src.carry(staging)
        config = dict(plan.config)
        if cast is not None:
            config = {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": str(cast).split(".")[-1]}
        raise_tokenizer_limit(staging, int(config["max_position_embeddings"]))
        write_json(staging / "config.json", config)
        facts = {"spec": spec.block() if spec else None, "bake_length": bake_length, "scale": scale}
        write_json(staging / PROVENANCE, provenance("export", str(run), **facts))
    if written["merged"] != len(trained.lora):
        raise CheckpointError(f"{run} holds LoRA for layers that {src.path} does not have")
    return {
        "out": str(out),
        "format": "per-head" if plan.rotary else "stock",
        "parameters": written["parameters"],
        "merged": written["merged"],
        "dtype": dtype or "as stored",
        "target": config["max_position_embeddings"],
        "notes": plan.notes,
    }


def open_trained(path: str | Path) -> Trained:
    """A run with its source, or a checkpoint by itself. A run without its rotary tensors is refused."""
    from safetensors.torch import load_file

    from ropex.loading import TRAINED, split_trained
    from ropex.lora import lora_pairs

    found = locate(path)
    if not is_run(found):
        source = open_source(found)
        return Trained(source, spec_of(source.config), source.rotary(), {})
    run = read_json(found / RUN)
    if not (found / TRAINED).exists():
        raise CheckpointError(f"{path} is a run that has not finished: continue it with `ropex extend --resume`")
    rotary, lora = split_trained(load_file(found / TRAINED))
    parent, spec = open_trained(run_source(found)), RotarySpec(**run["spec"])
    layers = rope_of(parent.source.config).layers
    if len(rotary) != 4 * layers:
        raise CheckpointError(f"{path} holds {len(rotary)} rotary tensors where {4 * layers} belong: it is incomplete")
    scale = run["lora"]["alpha"] / run["lora"]["r"] if run.get("lora") else 1.0
    merged = {module: list(pairs) for module, pairs in parent.lora.items()}
    for module, (a, b) in lora_pairs(lora).items():
        merged.setdefault(module, []).append((a, b, scale))
    return Trained(parent.source, spec, rotary, merged)


@dataclass(frozen=True)
class Plan:
    """config.json, the rotary tensors to write beside it (none for stock), lambda folded into q by layer, notes."""

    config: dict[str, Any]
    rotary: Tensors
    query_scale: dict[int, float]
    notes: list[str]


def _plan(trained: Trained, rope: Rope, bake_length: int | None, scale: bool) -> Plan:
    spec, config = trained.spec, trained.source.config
    if spec is None:
        if bake_length is not None or not scale:
            raise OptionError("this checkpoint has no length-dependent scale: leave --bake-length and --no-scale out")
        return Plan(config, {}, {}, [])
    if spec.learned and not spec.share_heads:
        if bake_length is not None or not scale:
            raise OptionError(
                "per-head AdaRoPE exports with its scale in a modeling file: leave --bake-length and --no-scale out"
            )
        return Plan(adarope_config(config, rope, spec), trained.rotary, {}, [])
    return _stock_plan(trained, spec, rope, bake_length, scale)


def _stock_plan(trained: Trained, spec: RotarySpec, rope: Rope, bake_length: int | None, scale: bool) -> Plan:
    """One table for all heads as a config that needs no code."""
    import torch

    from ropex.rotary import AdaRotary

    first = AdaRotary(rope.pairs, 1, 1, spec.window, log_coef=spec.log_coef, length=spec.length)
    prefix = next(iter(trained.rotary)).rpartition(".")[0]
    with torch.no_grad():
        for name in ("theta0", "delta", "tau", "gamma"):
            getattr(first, name).copy_(trained.rotary[f"{prefix}.{name}"])
        theta = first.theta()[0]
        grows = bool(first.gamma.ne(0).any()) or spec.log_coef != 0
        at = bake_length or spec.window
        value = float(first.scale(torch.tensor([[at - 1]]))[0, 0, 0])
    if grows and bake_length is None and scale:
        raise UnsupportedError(
            "the attention scale grows with the length, and no stock config can say that: give --bake-length N to fold "
            f"its value at N tokens into q (at {spec.target}: --bake-length {spec.target}), or --no-scale to drop it"
        )
    if not grows and (bake_length is not None or not scale):
        raise OptionError("this scale does not depend on the length: leave --bake-length and --no-scale out")
    notes, query_scale = [], {}
    if not grows:
        attention_factor = math.sqrt(value)
    else:
        attention_factor = 1.0
        if scale:
            query_scale = dict.fromkeys(range(rope.layers), value)
            notes.append(f"q is scaled by {value:.6g}, the scale at {bake_length} tokens, at every length")
        else:
            attention_factor = first.tau[0].item() ** -0.5
            notes.append("the part of the scale that grows with the length was dropped")
    entry = method(spec.table_method)
    same = bool((trained.rotary[f"{prefix}.delta"] == 0).all())
    if same and entry.stock is not None and attention_factor == spec.table(rope).attention_factor:
        block = entry.stock(rope, spec.params)
    else:
        block = longrope_block(theta, rope, spec, attention_factor)
    config = write_rope({k: v for k, v in trained.source.config.items() if k not in (ADAROPE, "auto_map")}, block)
    return Plan(
        config
        | {
            "model_type": rope.family.model_type,
            "architectures": [rope.family.causal_lm],
            "max_position_embeddings": spec.target,
        },
        {},
        query_scale,
        notes,
    )


def longrope_block(theta: "torch.Tensor", rope: Rope, spec: RotarySpec, attention_factor: float) -> dict[str, Any]:
    """Any table [F] as longrope factors: base^(-2f/R) / factor = theta; a pair at rest gets a huge factor.

    Each factor is the float32 whose table entry is nearest to theta, so the stock model turns by the same angles.
    """
    import torch

    powers = rope.rope_theta ** (torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim)
    guess = torch.where(theta > 0, 1.0 / (theta * powers), 1e30)
    up, down = guess.nextafter(guess + torch.inf), guess.nextafter(guess - torch.inf)
    candidates = torch.stack((guess, up, down, up.nextafter(up + torch.inf), down.nextafter(down - torch.inf)))
    error = (1.0 / (candidates * powers) - theta).abs()
    factors = candidates.gather(0, error.argmin(0, keepdim=True))[0].tolist()
    partial = {} if rope.rotary_dim == rope.head_dim else {"partial_rotary_factor": rope.rotary_dim / rope.head_dim}
    return {
        "rope_type": "longrope",
        "rope_theta": rope.rope_theta,
        "factor": max(spec.target / spec.window, 1.0),
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": spec.window,
        **partial,
    }


def _merged_tensors(
    trained: Trained, rope: Rope, query_scale: dict[int, float], cast: "torch.dtype | None", written: dict[str, int]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """The source's tensors, LoRA and scale folded in: the sum in float32, cast once."""
    from ropex.lora import merged

    family = rope.family
    for name, tensor in trained.source.tensors(every):
        module, _, kind = name.rpartition(".")
        out = tensor
        if module in trained.lora and kind == "weight":
            for a, b, scale in trained.lora[module]:
                out = merged(out, a, b, scale)
            written["merged"] += 1
        if query_scale and module.endswith(f".self_attn.{family.q_proj}"):
            out = out.float() * query_scale[int(module.split(".layers.")[1].split(".")[0])]
        if tensor.is_floating_point():
            out = _cast(out, cast or tensor.dtype, name)
        written["parameters"] += out.numel()
        yield name, out


def _cast(tensor: "torch.Tensor", dtype: "torch.dtype", name: str) -> "torch.Tensor":
    out = tensor.to(dtype)
    if not out.isfinite().all() and tensor.isfinite().all():
        raise OptionError(f"{name} has values that overflow {str(dtype).split('.')[-1]}: export as bfloat16 or float32")
    return out


def _then(tensors: Iterator[tuple[str, "torch.Tensor"]], rotary: Tensors) -> Iterator[tuple[str, "torch.Tensor"]]:
    yield from tensors
    yield from rotary.items()


def _torch_dtype(dtype: str | None) -> "torch.dtype | None":
    from ropex.loading import as_dtype

    return as_dtype(dtype)
