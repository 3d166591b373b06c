"""export: what a run trained, merged into a checkpoint that other tools load."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from ropex.checkpoint import RUN, TRAINED, is_gguf, is_run, locate, run_source
from ropex.config import ADAROPE, Rope, canonical, read_json, rope_of, write_rope
from ropex.convert.heads import Head, head_of, query_rows
from ropex.convert.modeling import adarope_config, plain_config, write_modeling
from ropex.convert.output import check_output, whole_folder, write_json, write_manifest
from ropex.convert.source import Source, every, open_source, parse_size, raise_tokenizer_limit, whole_rotary
from ropex.convert.weights import write_shards
from ropex.errors import CheckpointError, OptionError, UnsupportedError
from ropex.spec import RotarySpec, spec_of
from ropex.tables import longrope_block, stock_block

if TYPE_CHECKING:
    import torch

    from ropex.rotary import AdaRotary

Layout = Literal["safetensors", "gguf"]
Tensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Trained:
    """What is exported: a source, the spec, the rotary tensors of every layer, LoRA as {module: [(A, B, scale)]}, one
    entry a run where a run was trained on another, and whole weights that take the place of the source's, with the
    LoRA that came before them gone into them."""

    source: Source
    spec: RotarySpec | None
    rotary: Tensors
    lora: dict[str, list[tuple["torch.Tensor", "torch.Tensor", float]]]
    weights: Tensors


def export(
    run: str | Path,
    out: str | Path,
    *,
    to: Layout = "safetensors",
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    bake_length: int | None = None,
    scale: bool = True,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a run of `ropex extend` (or a checkpoint) as a merged checkpoint, in safetensors or as one GGUF file.

    Per-head heads export with one modeling file (trust_remote_code, ropex not needed); one table for all heads exports
    as a stock config. A scale that grows with the length has no stock form: bake_length=N folds its value at N tokens
    into q, scale=False drops it; without either such an export is refused. dtype: cast every weight but the rotary
    tensors; as stored by default. LoRA is summed in float32 and cast once. A GGUF file holds shared tables alone.
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
    written: dict[str, int] = {"parameters": 0, "merged": 0, "replaced": 0}
    config = dict(plan.config)
    if cast is not None:
        config = {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": str(cast).split(".")[-1]}
    facts = {"spec": spec.block() if spec else None, "bake_length": bake_length, "scale": scale}
    need = 2 * src.bytes if to == "gguf" else src.bytes
    with whole_folder(out, [src.path], overwrite, need) as staging:
        tensors = _merged_tensors(trained, rope, plan.query_scale, cast, written)
        if to == "gguf":
            _write_gguf(src, config, tensors, staging, out.name.removesuffix(".gguf"))
        else:
            metadata = src.checkpoint.metadata if src.checkpoint else {}
            write_shards(_then(tensors, plan.rotary), staging, limit, metadata)
            if plan.rotary:
                write_modeling(staging, rope.family)
            src.carry(staging)
            raise_tokenizer_limit(staging, int(config["max_position_embeddings"]))
            write_json(staging / "config.json", config)
        if written["merged"] != len(trained.lora):
            raise CheckpointError(f"{run} holds LoRA for layers that {src.path} does not have")
        if written["replaced"] != len(trained.weights):
            raise UnsupportedError(
                f"{run} trained weights that {src.path} stores under other names (experts one by one, say): "
                "these cannot be exported"
            )
        write_manifest(staging, "export", str(run), {}, **facts)
    return {
        "out": str(out),
        "format": "per-head" if plan.rotary else "gguf" if to == "gguf" else "stock",
        "parameters": written["parameters"],
        "merged": written["merged"],
        "dtype": dtype or "as stored",
        "target": config["max_position_embeddings"],
        "notes": plan.notes,
    }


def _write_gguf(
    src: Source, config: dict[str, Any], tensors: Iterator[tuple[str, "torch.Tensor"]], folder: Path, name: str
) -> None:
    """`name`.gguf in the folder, its tokenizer inside."""
    from ropex.convert.write_gguf import write_gguf

    with TemporaryDirectory() as tokenizer:
        src.carry(Path(tokenizer))
        write_gguf(config, tensors, Path(tokenizer), folder / f"{name}.gguf", src.path if is_gguf(src.path) else None)


def open_trained(path: str | Path) -> Trained:
    """A run with its source, or a checkpoint by itself. A run without its rotary tensors is refused."""
    from safetensors.torch import load_file

    from ropex.loading import split_trained
    from ropex.lora import lora_pairs

    found = locate(path)
    if not is_run(found):
        source = open_source(found)
        spec = spec_of(source.config)
        rotary = whole_rotary(source, spec, rope_of(source.config)) if spec else {}
        return Trained(source, spec, rotary, {}, {})
    run = read_json(found / RUN)
    if not (found / TRAINED).exists():
        raise CheckpointError(f"{path} is a run that has not finished: continue it with `ropex extend --resume`")
    rotary, lora, weights = split_trained(load_file(found / TRAINED))
    parent, spec = open_trained(run_source(found)), RotarySpec(**run["spec"])
    belong = 4 * len(spec.layers(rope_of(parent.source.config)))
    if len(rotary) != belong:
        raise CheckpointError(f"{path} holds {len(rotary)} rotary tensors where {belong} belong: it is incomplete")
    scale = run["lora"]["alpha"] / run["lora"]["r"] if run.get("lora") else 1.0
    merged = {module: list(pairs) for module, pairs in parent.lora.items() if f"{module}.weight" not in weights}
    for module, (a, b) in lora_pairs(lora).items():
        merged.setdefault(module, []).append((a, b, scale))
    return Trained(parent.source, spec, rotary, merged, parent.weights | weights)


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
        return Plan(config if config.get("rope_theta") is not None else _both_spellings(config, rope), {}, {}, [])
    if spec.learned and not spec.share_heads:
        if bake_length is not None or not scale:
            raise OptionError(
                "per-head AdaRoPE exports with its scale in a modeling file: leave --bake-length and --no-scale out"
            )
        newer = "other tools load this with transformers 5.24 or later"
        return Plan(adarope_config(canonical(config), rope, spec), trained.rotary, {}, [newer])
    return _stock_plan(trained, spec, rope, bake_length, scale)


def _both_spellings(config: dict[str, Any], rope: Rope) -> dict[str, Any]:
    """A stock config whose rope readers of transformers 4 find as well."""
    main, local = (
        r and {"rope_type": r.rope_type, "rope_theta": r.rope_theta, **r.scaling} for r in (rope, rope.local)
    )
    return write_rope(canonical(config), main, local)  # type: ignore[arg-type]


def _stock_plan(trained: Trained, spec: RotarySpec, rope: Rope, bake_length: int | None, scale: bool) -> Plan:
    """One table for all heads as a config that needs no code."""
    if spec.pairing != rope.family.pairing:
        raise UnsupportedError(
            f"these weights are {spec.pairing}, and {rope.family.model_type}'s code turns {rope.family.pairing} pairs: "
            f"no stock config can say that. Write them with `ropex convert --pairing {rope.family.pairing}`"
        )
    first, grows = _first_head(trained, spec, rope)
    if grows and bake_length is None and scale:
        raise UnsupportedError(
            "the attention scale grows with the length, and no stock config can say that: give --bake-length N to fold "
            f"its value at N tokens into q (at {spec.target}: --bake-length {spec.target}), or --no-scale to drop it"
        )
    if not grows and (bake_length is not None or not scale):
        raise OptionError("this scale does not depend on the length: leave --bake-length and --no-scale out")
    notes, query_scale = [], {}
    attention_factor, value = math.sqrt(spec.turn_scale(rope)), _scale_at(first, bake_length or spec.window)
    if grows and not scale:
        value = 1 / first.tau[0].item()
        notes.append("the part of the scale that grows with the length was dropped")
    if not (grows and scale) and rope.rotary_dim == rope.head_dim:
        attention_factor *= math.sqrt(value)
    elif value != 1:
        if trained.source.config.get("clip_qkv") is not None:
            raise UnsupportedError(
                "clip_qkv cuts queries off after their projection, where a scale cannot be folded in"
            )
        query_scale = dict.fromkeys(spec.layers(rope), value)
        notes.append(f"q is scaled by {value:.6g} at every length")

    def block(own: Rope) -> dict[str, Any]:
        head, _ = _first_head(trained, spec, own)
        block = stock_block(spec.table_method, own, spec.params) if bool((head.delta == 0).all()) else None
        if block is not None and attention_factor == spec.table(own).attention_factor:
            return block
        return longrope_block(head.theta()[0].detach(), own, attention_factor, spec.target / spec.window)

    local = None
    if rope.local is not None:
        own = {"rope_type": rope.local.rope_type, "rope_theta": rope.local.rope_theta, **rope.local.scaling}
        local = block(rope.local) if spec.sliding else own
    config = write_rope(plain_config(canonical(trained.source.config), rope.family), block(rope), local)
    if config["rope_scaling"] and config["rope_scaling"]["rope_type"] == "proportional":
        notes.append("other tools load this with transformers 5.24 or later")
    stated = {"max_position_embeddings": spec.target, "head_dim": rope.head_dim}
    return Plan(config | stated, {}, query_scale, notes)


def _first_head(trained: Trained, spec: RotarySpec, rope: Rope) -> tuple["AdaRotary", bool]:
    """The rotary of the first layer that `rope` turns, which all of them share, and whether its scale grows."""
    import torch

    from ropex.rotary import AdaRotary

    head = AdaRotary(rope.pairs, 1, 1, spec.window, log_coef=spec.log_coef, length=spec.length)
    prefix = f"{rope.family.layer.format(rope.turning[0])}.{ADAROPE}"
    with torch.no_grad():
        for name in ("theta0", "delta", "tau", "gamma"):
            getattr(head, name).copy_(trained.rotary[f"{prefix}.{name}"])
    return head, bool(head.gamma.ne(0).any()) or spec.log_coef != 0


def _scale_at(head: "AdaRotary", tokens: int) -> float:
    """lambda of the last of that many tokens."""
    import torch

    return head.scale(torch.tensor([[tokens - 1]]))[0, 0, 0].item()


def _merged_tensors(
    trained: Trained, rope: Rope, query_scale: dict[int, float], cast: "torch.dtype | None", written: dict[str, int]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """The source's tensors, LoRA and scale folded in: the sum in float32, cast once."""
    from ropex.lora import merged

    for name, tensor in trained.source.tensors(every):
        module, _, kind = name.rpartition(".")
        out = trained.weights.get(name, tensor)
        written["replaced"] += name in trained.weights
        if module in trained.lora and kind == "weight":
            for a, b, scale in trained.lora[module]:
                out = merged(out, a, b, scale)
            written["merged"] += 1
        head = head_of(name, rope.family)
        if head is not None and head.layer in query_scale:
            out = _fold(out, name, head, trained.source.config, rope, query_scale[head.layer])
        if tensor.is_floating_point():
            out = _cast(out, cast or tensor.dtype, name)
        written["parameters"] += out.numel()
        yield name, out


def _fold(
    tensor: "torch.Tensor", name: str, head: Head, config: dict[str, Any], rope: Rope, scale: float
) -> "torch.Tensor":
    """Multiply what comes out as queries by `scale`: in their norm, where they pass one, else in their projection."""
    import torch

    family = rope.family
    if family.q_norm and (not family.norm_flag or config.get(family.norm_flag)):
        if head.part != "q norm":
            return tensor
        offset = 1.0 if family.unit_offset and head.inner == "weight" else 0.0
        return (tensor.float() + offset) * scale - offset
    rows = query_rows(name, tuple(tensor.shape), rope)
    if rows is None:
        return tensor
    factor = torch.where(torch.from_numpy(rows), scale, 1.0)
    return tensor.float() * factor.view(-1, *[1] * (tensor.ndim - 1))


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
