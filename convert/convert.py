"""convert: another rotary embedding or pairing in a new folder; everything else byte for byte."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropex.checkpoint import locate
from ropex.config import ADAROPE, Rope, rope_of, write_rope
from ropex.convert import plan
from ropex.convert.heads import head_of, row_index
from ropex.convert.modeling import adarope_config, plain_config, write_modeling
from ropex.convert.output import check_output, whole_folder, write_json, write_manifest
from ropex.convert.shards import Shard, sha256, write
from ropex.convert.source import Source, every, open_source, raise_tokenizer_limit
from ropex.convert.weights import dtype_name, reorder, write_index, write_shards
from ropex.errors import CheckpointError, OptionError, RopexError, UnsupportedError
from ropex.families import Pairing
from ropex.spec import Length, RotarySpec, make_spec, spec_of
from ropex.tables import method, stock_table, two_lengths

if TYPE_CHECKING:
    import torch

Rotary = dict[str, "torch.Tensor"]


def convert(
    source: str | Path,
    out: str | Path,
    to: str | None = None,
    *,
    init: str | None = None,
    factor: float | None = None,
    target: int | None = None,
    params: Mapping[str, Any] | None = None,
    share_heads: bool = False,
    sliding: bool = False,
    length: Length = "position",
    pairing: Pairing | None = None,
    from_pairing: Pairing | None = None,
    adapter: str | Path | None = None,
    window: int | None = None,
    link: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Write `source` with the rotary method `to`, in the pairing `pairing`, into the new folder `out`.

    A method that a stock config can state gets one; adarope, scales that grow with the length, and a pairing that is
    not the one the family's code runs get the per-head format. Without `to` only the pairing changes. from_pairing:
    how the source's rows really lie, where that is not what its family's code runs.
    adapter: a folder with a PEFT LoRA adapter, merged first. window: see open_source.
    sliding: convert the layers of sliding attention with a table of their own as well. link: hard-link shards that do
    not change (the source's files and the output's are then the same). dry_run: write nothing, return the plan.

    Returns {"out", "method", "format", "pairing", "unchanged", "window", "target", "added_parameters", "notes"}, with
    dry_run "plan", with an adapter "adapter" (what was merged). unchanged: the logits are the source's by design.
    target: tokens.
    """
    out = Path(out)
    check_output(out, [], overwrite)
    src, tally, sources = open_source(source, window), None, []
    if adapter is not None:
        from ropex.convert.adapter import with_adapter

        sources.append(locate(adapter))
        src, tally = with_adapter(src, sources[0])
    sources.append(src.path)
    check_output(out, sources, overwrite)
    rope = _rope(src, from_pairing)
    wanted = pairing or (rope.pairing if ADAROPE in src.config else rope.family.pairing)
    asked = {"factor": factor, "target": target, "init": init, "params": params, "share_heads": share_heads}
    spec = _spec(src, rope, to, wanted, {**asked, "length": length, "sliding": sliding})
    stock = _stock_parameters(spec, rope)
    unchanged = to is None or (_check_effect(spec, rope) if stock is None else spec.identity)
    config = _config(src.config, rope, spec, stock)
    rotary = {} if stock else src.rotary() or rotary_tensors(spec, rope)
    notes = _notes(spec, rope) + src.notes
    shards = plan.plan_shards(src.checkpoint, rope, wanted, bool(rotary)) if src.checkpoint else None
    result = {
        "out": str(out),
        "method": spec.method,
        "format": "per-head" if stock is None else "stock",
        "pairing": wanted,
        "unchanged": unchanged,
        "window": spec.window,
        "target": spec.target,
        "added_parameters": sum(t.numel() for n, t in rotary.items() if spec.learned and not n.endswith("theta0")),
        "notes": notes,
        **({"adapter": tally} if tally else {}),
    }
    if dry_run:
        if shards is None:
            raise OptionError(
                "--dry-run plans what happens to the shards of a safetensors folder: here every tensor is written anew"
            )
        return result | {"plan": plan.describe(shards, src.config, config, link)}
    if src.checkpoint and link:
        notes.append("linked shards were not read: check them with `ropex verify`")
    elif src.checkpoint:
        plan.require_finite(src.checkpoint, rope)
    need = src.bytes if shards is None else plan.describe(shards, {}, {}, link)["bytes"]
    with whole_folder(out, sources, overwrite, need) as staging:
        src.carry(staging)
        raise_tokenizer_limit(staging, spec.target)
        hashes: dict[str, str | None] = {}
        if shards is None:
            _stream(src, rope, wanted, rotary, staging)
        else:
            hashes = _write(shards, rotary, staging, link, progress or (lambda what, done, total: None))
        if stock is None:
            write_modeling(staging, rope.family)
        write_json(staging / "config.json", config)
        write_manifest(staging, "convert", str(source), hashes, spec=spec.block(), adapter=adapter and str(adapter))
    return result


def _rope(src: Source, from_pairing: Pairing | None) -> Rope:
    rope = rope_of(src.config)
    if from_pairing is None:
        return rope
    if ADAROPE in src.config and from_pairing != rope.pairing:
        raise OptionError(f"--from-pairing: {src.path} records its pairing, {rope.pairing}: leave the option out")
    return replace(rope, pairing=from_pairing)


def _spec(src: Source, rope: Rope, to: str | None, wanted: Pairing, asked: dict[str, Any]) -> RotarySpec:
    """The method with everything it depends on: the one asked for, or the source's own under another pairing."""
    if to is not None:
        if ADAROPE in src.config:
            raise UnsupportedError(
                f"{src.path} is converted already: convert its parent, or train it on with `ropex extend`"
            )
        return make_spec(to, rope, pairing=wanted, **asked)
    if given := [k for k, v in asked.items() if v not in (None, False, "position")]:
        raise OptionError(f"--{given[0].replace('_', '-')} belongs to a method: give one with --to")
    if wanted == rope.pairing:
        raise OptionError(f"{src.path} is {wanted} already: give a method with --to, or the other pairing")
    own = spec_of(src.config)
    return replace(own, pairing=wanted) if own else make_spec("rope", rope, pairing=wanted)


def rotary_tensors(spec: RotarySpec, rope: Rope) -> Rotary:
    """The rotary tensors of a fresh conversion by checkpoint name, float32."""
    return {
        f"{rope.family.layer.format(layer)}.{ADAROPE}.{name}": tensor.clone()
        for layer, own in spec.layers(rope).items()
        for name, tensor in spec.fresh(own).items()
    }


def _check_effect(spec: RotarySpec, rope: Rope) -> bool:
    """Does the table of a per-head conversion leave the parent's logits as they are? It must where it is meant to."""
    table = spec.table(rope)
    own = stock_table(rope, {"rope_type": rope.rope_type, "rope_theta": rope.rope_theta, **rope.scaling})
    same = bool((own.theta == table.theta).all()) and own.attention_factor == table.attention_factor
    if spec.identity and not same:
        raise RopexError(f"'{spec.method}' should have kept the parent's table: a bug in ropex, please report it")
    return spec.identity and table.log_coef == 0


def _stock_parameters(spec: RotarySpec, rope: Rope) -> dict[str, Any] | None:
    """The rope_parameters block of a stock config, or None where only the per-head format can say it."""
    entry = method(spec.method)
    if spec.learned or entry.log_coef or entry.stock is None or spec.pairing != rope.family.pairing:
        return None
    return entry.stock(rope, spec.params)


def _config(config: dict[str, Any], rope: Rope, spec: RotarySpec, stock: dict[str, Any] | None) -> dict[str, Any]:
    if stock is None:
        return adarope_config(config, rope, spec)
    plain = plain_config(config, rope.family)
    if spec.method == "rope":  # the parent's own words stay
        return plain
    local = None
    if rope.local is not None:
        local = {"rope_type": rope.local.rope_type, "rope_theta": rope.local.rope_theta, **rope.local.scaling}
        if spec.sliding:
            local = method(spec.method).stock(rope.local, spec.params)  # type: ignore[misc]
    return write_rope(plain, stock, local) | {"max_position_embeddings": spec.target}


def _notes(spec: RotarySpec, rope: Rope) -> list[str]:
    notes = []
    if method(spec.table_method).heals:
        notes.append(f"'{spec.table_method}' breaks a pretrained model until it is trained; evaluate before you use it")
    elif spec.target > max(spec.window, rope.max_position_embeddings) and spec.identity:
        notes.append(
            f"the config claims {spec.target} tokens, but the table is the parent's own: past {spec.window} it "
            "fails until it is trained; --init yarn stretches it"
        )
    elif spec.target > spec.window and not spec.identity:
        notes.append(f"the config now claims {spec.target} tokens; the weights were trained for {spec.window}")
    if rope.window < rope.max_position_embeddings and rope.rope_type == "yarn":
        notes.append(f"the parent was extended before: this starts from its original {rope.window} tokens")
    if rope.rotary_dim < rope.head_dim and method(spec.table_method).ours is not None:
        notes.append(
            f"{rope.rotary_dim} of {rope.head_dim} channels turned before; '{spec.table_method}' counts its pairs "
            "among those, and the others stay at rest"
        )
    if choice := spec.params.get("table"):
        other, tokens = "long" if choice == "short" else "short", rope.scaling["original_max_position_embeddings"]
        notes.append(
            f"the parent changes tables above {tokens} tokens; this has the {choice} one at every length "
            f"(--set table={other} for the other)"
        )
    elif two_lengths(rope) and spec.method != "rope":
        notes.append("the parent's two longrope tables are replaced")
    return notes


def _write(
    shards: list[Shard], rotary: Rotary, folder: Path, link: bool, say: Callable[[str, int, int], None]
) -> dict[str, str | None]:
    """Write the shards, the rotary tensors in a small one of their own, and the index; the hash of each file (None for
    a link, which nobody read). A shard is hashed while the next is copied."""
    hashes: dict[str, Any] = {}
    with ThreadPoolExecutor(1) as pool:
        for done, shard in enumerate(shards):
            say(f"writing {shard.name}", done, len(shards))
            linked = write(shard, folder, link)
            hashes[shard.name] = None if linked else pool.submit(sha256, folder / shard.name)
        found = {name: future and future.result() for name, future in hashes.items()}
    weight_map, total = plan.weight_map(shards)
    if rotary:
        from safetensors.torch import save_file

        save_file(rotary, folder / plan.ROTARY_SHARD, shards[0].metadata)
        weight_map |= dict.fromkeys(rotary, plan.ROTARY_SHARD)
        total += sum(t.numel() * 4 for t in rotary.values())
    if len(set(weight_map.values())) > 1 or shards[0].name != plan.SINGLE:
        write_index(folder, weight_map, total)
    return found


def _stream(src: Source, rope: Rope, wanted: Pairing, rotary: Rotary, folder: Path) -> None:
    """Write a source that is no safetensors folder, tensor by tensor."""

    def tensors() -> Iterable[tuple[str, "torch.Tensor"]]:
        for name, tensor in src.tensors(every):
            if head_of(name, rope.family) and not tensor.isfinite().all():
                raise CheckpointError(f"{src.path}: {name} has values that are not finite numbers: it is damaged")
            index = row_index(name, tuple(tensor.shape), dtype_name(tensor.dtype), rope, wanted)
            yield name, tensor if index is None else reorder(tensor, index)
        yield from rotary.items()

    write_shards(tensors(), folder, 5 * 10**9, {})
