"""convert: another rotary embedding or pairing in a new folder; everything else byte for byte."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropex.checkpoint import is_gguf, is_meta, locate
from ropex.config import ADAROPE, Rope, canonical, read_json, rope_of, write_rope
from ropex.convert import plan
from ropex.convert.heads import head_of, row_index
from ropex.convert.modeling import adarope_config, plain_config, write_modeling
from ropex.convert.output import PROVENANCE, check_output, whole_folder, write_json, write_manifest
from ropex.convert.shards import Shard, sha256, write
from ropex.convert.source import Source, every, open_source, raise_tokenizer_limit, whole_rotary
from ropex.convert.weights import dtype_name, reorder, write_index, write_shard, write_shards
from ropex.errors import CheckpointError, OptionError, RopexError, UnsupportedError
from ropex.families import Pairing
from ropex.spec import Length, RotarySpec, make_spec, spec_of
from ropex.tables import method, stock_block, stock_table

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
    kept = to is None and ADAROPE in src.config  # the heads of a converted source, as they are
    unchanged = kept or (_check_effect(spec, rope) if stock is None else spec.identity)
    config = _config(src.config, rope, spec, stock)
    rotary = {} if stock else whole_rotary(src, spec, rope) if kept else rotary_tensors(spec, rope)
    notes = _notes(spec, rope, src, stock) + src.notes
    if (out / PROVENANCE).exists():
        notes.append(f"{out} held what was made of {read_json(out / PROVENANCE).get('source')}: that is replaced")
    if link and src.checkpoint is None:
        notes.append("--link has no effect here: every tensor is written anew")
    elif link and not _same_disk(src.path, out):
        link = False
        notes.append("files cannot be linked across disks: they are copied")
    shards = plan.plan_shards(src.checkpoint, rope, wanted, bool(rotary)) if src.checkpoint else []
    result = {
        "out": str(out),
        "method": spec.method,
        "format": "per-head" if stock is None else "stock",
        "pairing": wanted,
        "unchanged": unchanged and from_pairing in (None, rope_of(src.config).pairing),
        "window": spec.window,
        "target": spec.target,
        "added_parameters": sum(t.numel() for n, t in rotary.items() if spec.learned and not n.endswith("theta0")),
        "notes": notes,
        **({"adapter": tally} if tally else {}),
    }
    described = plan.describe(shards, src.config, config, link)
    if src.checkpoint is None:
        described["bytes"] = src.bytes
    if dry_run:
        return result | {"plan": described}
    if src.checkpoint and link:
        notes.append("linked shards were not read: check them with `ropex verify`")
    elif src.checkpoint:
        plan.require_finite(src.checkpoint, rope)
    with whole_folder(out, sources, overwrite, described["bytes"]) as staging:
        src.carry(staging)
        if not any(staging.glob("tokenizer*")):
            notes.append("no tokenizer came along: put its files into the output before it is used")
        if spec.target > rope.max_position_embeddings:
            raise_tokenizer_limit(staging, spec.target)
        hashes: dict[str, str | None] = {}
        if src.checkpoint is None:
            _stream(src, rope, wanted, rotary, staging)
        else:
            hashes = _write(shards, rotary, staging, link, progress or (lambda what, done, total: None))
            if link and any(shard.whole and hashes[shard.name] is not None for shard in shards):
                notes.append("some files could not be linked: they are copied")
                plan.require_finite(src.checkpoint, rope)
        if stock is None:
            write_modeling(staging, rope.family)
        write_json(staging / "config.json", config)
        made_by = {"spec": spec.block(), "adapter": adapter and str(adapter)}
        write_manifest(staging, "convert", str(source), hashes, **made_by)
    return result


def _same_disk(source: Path, out: Path) -> bool:
    """Can a file of `source` have a second name in `out`?"""
    place = out.expanduser().resolve()
    while not place.exists():
        place = place.parent
    return all(file.resolve().stat().st_dev == place.stat().st_dev for file in source.glob("*.safetensors"))


def _rope(src: Source, from_pairing: Pairing | None) -> Rope:
    rope = rope_of(src.config)
    if from_pairing is None:
        return rope
    if is_gguf(src.path) or is_meta(src.path):
        raise OptionError(f"--from-pairing: the format of {src.path} says how its rows lie: leave the option out")
    if ADAROPE in src.config and from_pairing != rope.pairing:
        raise OptionError(f"--from-pairing: {src.path} records its pairing, {rope.pairing}: leave the option out")
    return replace(rope, pairing=from_pairing, local=rope.local and replace(rope.local, pairing=from_pairing))


def _spec(src: Source, rope: Rope, to: str | None, wanted: Pairing, asked: dict[str, Any]) -> RotarySpec:
    """The method with everything it depends on: the one asked for, or the source's own under another pairing."""
    if to is not None:
        if ADAROPE in src.config:
            raise UnsupportedError(
                f"{src.path} is converted already: convert its parent, or train it on with `ropex extend`"
            )
        return make_spec(to, rope, pairing=wanted, **asked)
    if wanted == rope.pairing:
        raise OptionError(f"{src.path} is {wanted} already: give a method with --to, or the other pairing")
    own = spec_of(src.config)
    free = () if own else ("params",)  # which of two tables a re-paired parent keeps
    if given := [k for k, v in asked.items() if v not in (None, False, "position") and k not in free]:
        raise OptionError(f"--{given[0].replace('_', '-')} belongs to a method: give one with --to")
    if own is None:
        return make_spec("rope", rope, pairing=wanted, params=asked["params"])
    if rope.local is not None and not own.sliding:
        raise UnsupportedError(
            f"the sliding layers of {src.path} are not converted, and their code turns {rope.family.pairing} pairs: "
            "give --pairing when you convert the parent, with --sliding-layers"
        )
    return replace(own, pairing=wanted)


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
    if spec.learned or spec.log_coef or spec.pairing != rope.family.pairing:
        return None
    return stock_block(spec.method, rope, spec.params)


def _config(config: dict[str, Any], rope: Rope, spec: RotarySpec, stock: dict[str, Any] | None) -> dict[str, Any]:
    config = canonical(config)
    if stock is None:
        return adarope_config(config, rope, spec)
    plain = plain_config(config, rope.family)
    claims = {} if spec.target == rope.max_position_embeddings else {"max_position_embeddings": spec.target}
    if spec.method == "rope" and plain.get("rope_theta") is not None:  # the parent's own words, which all readers know
        return plain | claims
    local = None
    if rope.local is not None:
        local = {"rope_type": rope.local.rope_type, "rope_theta": rope.local.rope_theta, **rope.local.scaling}
        if spec.sliding:
            local = stock_block(spec.method, rope.local, spec.params)
    geometry = {} if spec.method == "rope" else {"head_dim": rope.head_dim}  # some readers take silence for None
    return write_rope(plain, stock, local) | claims | geometry


def _notes(spec: RotarySpec, rope: Rope, src: Source, stock: dict[str, Any] | None) -> list[str]:
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
    if rope.rope_type == "yarn" and ADAROPE not in src.config:
        how = "its yarn table is kept" if spec.identity else f"this starts from its original {rope.window} tokens"
        notes.append(f"the parent was extended before, to {rope.max_position_embeddings} tokens: {how}")
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
    if stock is None or stock["rope_type"] == "proportional":
        notes.append("other tools load this with transformers 5.24 or later")
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
        write_shard(folder / plan.ROTARY_SHARD, rotary, shards[0].metadata)
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
