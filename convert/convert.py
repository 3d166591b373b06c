"""convert: another rotary embedding in a new folder, every existing tensor byte for byte."""

from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any

from ropex.checkpoint import INDEX, SINGLE
from ropex.config import ADAROPE, Rope, rope_of, write_rope
from ropex.convert.modeling import adarope_config, write_modeling
from ropex.convert.output import PROVENANCE, check_output, provenance, whole_folder, write_json
from ropex.convert.source import Source, every, open_source, raise_tokenizer_limit, require_finite
from ropex.convert.weights import write_index, write_shards
from ropex.errors import RopexError, UnsupportedError
from ropex.spec import Length, RotarySpec, make_spec
from ropex.tables import method, stock_table

if TYPE_CHECKING:
    import torch

ROTARY_SHARD = "model-adarope.safetensors"
WHOLE_SHARD = "model-00001-of-00001.safetensors"


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    init: str | None = None,
    factor: float | None = None,
    target: int | None = None,
    params: Mapping[str, Any] | None = None,
    share_heads: bool = False,
    length: Length = "position",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write `source` with the rotary method `to` into the new folder `out`.

    A method that a stock config can state gets one; adarope, and scales that grow with the length, get the per-head
    format. Returns {"out", "method", "format", "unchanged", "window", "target", "added_parameters", "notes"};
    `unchanged` is True where the logits are the parent's by design. target: tokens.
    """
    out = Path(out)
    check_output(out, [], overwrite)
    src = open_source(source)
    check_output(out, [src.path], overwrite)
    if ADAROPE in src.config:
        raise UnsupportedError(f"{source} is converted already: convert its parent, or train it on with `ropex extend`")
    rope = rope_of(src.config)
    spec = make_spec(
        to, rope, factor=factor, target=target, init=init, params=params, share_heads=share_heads, length=length
    )
    table = spec.table(rope)
    unchanged = _unchanged(rope, table.theta, table.attention_factor) and table.log_coef == 0
    if unchanged != spec.identity:
        raise RopexError(
            f"'{spec.table_method}' gives the parent's own table here, so nothing would change: raise --factor"
            if unchanged
            else f"'{to}' should have kept the parent's table and did not: this is a bug in ropex, please report it"
        )
    require_finite(src, rope)
    stock = _stock_parameters(spec, rope)
    with whole_folder(out, [src.path], overwrite, src.bytes) as staging:
        if stock is None:
            config, rotary = adarope_config(src.config, rope, spec), rotary_tensors(spec, rope)
            write_modeling(staging, rope.family)
        else:
            config = write_rope(src.config, stock) | {"max_position_embeddings": spec.target}
            rotary = {}
        _copy_weights(src, staging, rotary)
        src.carry(staging)
        raise_tokenizer_limit(staging, spec.target)
        write_json(staging / "config.json", config)
        write_json(staging / PROVENANCE, provenance("convert", str(source), spec=spec.block()))
    return {
        "out": str(out),
        "method": to,
        "format": "per-head" if stock is None else "stock",
        "unchanged": unchanged,
        "window": spec.window,
        "target": spec.target,
        "added_parameters": sum(t.numel() for name, t in rotary.items() if not name.endswith("theta0")),
        "notes": _notes(spec),
    }


def rotary_tensors(spec: RotarySpec, rope: Rope) -> dict[str, "torch.Tensor"]:
    """The rotary tensors of a fresh conversion by checkpoint name, float32."""
    return {
        f"model.layers.{layer}.self_attn.{ADAROPE}.{name}": tensor.clone()
        for layer in range(rope.layers)
        for name, tensor in spec.fresh(rope).items()
    }


def _unchanged(rope: Rope, theta: "torch.Tensor", attention_factor: float) -> bool:
    """Does this table turn heads exactly as the parent's own config does?"""
    own = stock_table(rope, {"rope_type": rope.rope_type, "rope_theta": rope.rope_theta, **rope.scaling})
    return bool((own.theta == theta).all()) and own.attention_factor == attention_factor


def _stock_parameters(spec: RotarySpec, rope: Rope) -> dict[str, Any] | None:
    """The rope_parameters block of a stock config, or None where only the per-head format can say it."""
    entry = method(spec.method)
    if spec.learned or entry.log_coef or entry.stock is None:
        return None
    return entry.stock(rope, spec.params)


def _notes(spec: RotarySpec) -> list[str]:
    notes = []
    if method(spec.table_method).heals:
        notes.append(f"'{spec.table_method}' breaks a pretrained model until it is trained; evaluate before you use it")
    elif spec.target > spec.window and spec.identity:
        notes.append(
            f"the config claims {spec.target} tokens, but the table is the parent's own: past {spec.window} it "
            "fails until it is trained; --init yarn stretches it"
        )
    elif spec.target > spec.window:
        notes.append(f"the config now claims {spec.target} tokens; the weights were trained for {spec.window}")
    return notes


def _copy_weights(src: Source, folder: Path, rotary: dict[str, "torch.Tensor"]) -> None:
    """Existing tensors byte for byte; rotary ones in a small shard of their own."""
    from safetensors.torch import save_file

    if src.checkpoint is None:  # GGUF: nothing on disk to copy
        write_shards([*src.tensors(every), *rotary.items()], folder, 5 * 10**9, {})
        return
    checkpoint = src.checkpoint
    single = not (checkpoint.path / INDEX).exists()
    names = {file: WHOLE_SHARD if single else file.name for file in checkpoint.shards}
    if single and not rotary:
        names = {file: SINGLE for file in checkpoint.shards}
    for file, name in names.items():
        copyfile(file, folder / name)
    if single and not rotary:
        return
    weight_map = {name: names[info.file] for name, info in checkpoint.tensors.items()}
    total = sum(info.end - info.start for info in checkpoint.tensors.values())
    if rotary:
        save_file(rotary, folder / ROTARY_SHARD, checkpoint.metadata | {"format": "pt"})
        weight_map |= dict.fromkeys(rotary, ROTARY_SHARD)
        total += sum(t.numel() * 4 for t in rotary.values())
    write_index(folder, weight_map, total)
