"""Merging a PEFT LoRA adapter into a checkpoint while it is read: W + scale * B A, summed in float32 and cast once."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropex.checkpoint import read_header
from ropex.config import read_json
from ropex.convert.read_bin import load_pickle, ties_words, words_and_head
from ropex.convert.source import Source, Wanted
from ropex.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_CHANGES_MORE = ("fan_in_fan_out", "alora_invocation_tokens", "layer_replication", "use_qalora", "use_bdlora",
                 "arrow_config", "kasa_config", "monteclora_config")  # fmt: skip
_BASE_KEPT = ("gaussian", "eva", "orthogonal")  # initialisations that leave the base's weights alone
_NAME = r"(?:\.default)?"  # older files hold the adapter's name
_SLOTS = {  # what follows a module's name: what it is, and which tensor of the module it changes
    rf"\.lora_A{_NAME}\.weight": ("a", ".weight"),
    rf"\.lora_B{_NAME}\.weight": ("b", ".weight"),
    rf"\.lora_embedding_A{_NAME}": ("embedding a", ".weight"),
    rf"\.lora_embedding_B{_NAME}": ("embedding b", ".weight"),
    rf"\.lora_magnitude_vector{_NAME}(?:\.weight)?": ("magnitude", ".weight"),
    rf"\.lora_B{_NAME}\.bias": ("bias", ".bias"),
}

Change = dict[str, str]  # what is done to one base tensor: the slots that are filled, and the adapter's names for them
Get = Callable[[str], "torch.Tensor"]


def with_adapter(source: Source, adapter: Path) -> tuple[Source, dict[str, int]]:
    """The source with the adapter in folder `adapter` merged in, and a tally: {"adapter_tensors", "merged",
    "replaced"}, the last two counting base tensors.

    LoRA, rsLoRA and DoRA are summed in float32 and cast to the base tensor's dtype; `modules_to_save` take the base
    tensor's place. Where the word embeddings or a head tied to them change, each gets what the adapter says of it (a
    live PeftModel does the same; PEFT's own merge adds to both), and the config unties them unless they stay equal.
    Errors: UnsupportedError for an adapter that is no LoRA, and for any tensor in it that has no place in the base;
    CheckpointError for one that is missing, damaged or does not fit.
    """
    if not (adapter / CONFIG).is_file():
        raise CheckpointError(f"{adapter} has no {CONFIG}: give the folder of a PEFT adapter")
    settings = read_json(adapter / CONFIG)
    _require_lora(settings, adapter)
    names, get = _open(adapter)
    changes = _changes(names, adapter)
    base = _names(source)
    pair = words_and_head(base) if ties_words(source.config) else None
    known = {*base, *(pair or ())}
    for target, change in changes.items():
        if target not in known:
            raise UnsupportedError(
                f"{adapter}: {next(iter(change.values()))} changes {target}, which {source.path} does not have: "
                "merge this adapter with the tool that made it"
            )
    _require_whole(changes, settings, adapter)
    words, head = pair or ("", "")
    untied = pair is not None and not _same(words, head, changes, settings, get)

    def applied(name: str, weight: "torch.Tensor") -> "torch.Tensor":
        return _applied(name, weight, changes[name], settings, get, adapter) if name in changes else weight

    def read(wanted: Wanted) -> Iterator[tuple[str, "torch.Tensor"]]:
        def wanted_of_base(name: str) -> bool:
            if untied and name == head:  # a stored copy that the config overrules
                return False
            return wanted(name) or (untied and name == words and wanted(head))

        for name, tensor in source.tensors(wanted_of_base):
            if wanted(name):
                yield name, applied(name, tensor)
            if untied and name == words and wanted(head):
                yield head, applied(head, tensor)

    config = source.config | ({"tie_word_embeddings": False} if untied else {})
    replaced = sum(change.keys() == {"replacement"} for change in changes.values())
    tally = {"adapter_tensors": len(names), "merged": len(changes) - replaced, "replaced": replaced}
    return replace(source, config=config, tensors=read, checkpoint=None), tally


def _require_lora(settings: dict[str, Any], adapter: Path) -> None:
    """Refuse what the tensors alone would not show."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{adapter} is a {kind} adapter, which ropex cannot merge: merge it with PEFT")
    for key in _CHANGES_MORE:
        if settings.get(key):
            raise UnsupportedError(f"{adapter / CONFIG} sets {key}, which ropex cannot merge: merge it with PEFT")
    start = settings.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _BASE_KEPT:
        raise UnsupportedError(
            f"{adapter} was started with init_lora_weights={start!r}, which changed the base's weights too: save it "
            "with path_initial_model_for_weight_conversion, or merge it with PEFT"
        )


def _open(adapter: Path) -> tuple[list[str], Get]:
    """The adapter's tensor names, and a way to read one."""
    for file in (adapter / name for name in _FILES):
        if not file.is_file():
            continue
        if file.suffix == ".bin":
            tensors = load_pickle(file)
            return list(tensors), tensors.__getitem__
        from safetensors import safe_open

        names = list(read_header(file)[0])
        handle = safe_open(file, "pt")
        return names, handle.get_tensor
    raise CheckpointError(f"{adapter} has a {CONFIG} but no {_FILES[0]}: download it again")


def _changes(names: list[str], adapter: Path) -> dict[str, Change]:
    """What the adapter does, by base tensor. Every tensor of the adapter stands in it once."""
    changes: dict[str, Change] = {}
    for name in names:
        inner = name.removeprefix("base_model.model.")
        target, slot = re.sub(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)", "", inner), "replacement"
        for pattern, (what, tensor) in _SLOTS.items():
            if match := re.fullmatch(rf"(.+?){pattern}", inner):
                target, slot = match[1] + tensor, what
        change = changes.setdefault(target, {})
        if slot in change:
            raise CheckpointError(f"{adapter} holds {change[slot]} and {name}, which say the same thing twice")
        change[slot] = name
    if not changes:
        raise CheckpointError(f"{adapter} holds no tensors: save it again with PEFT")
    return changes


def _require_whole(changes: dict[str, Change], settings: dict[str, Any], adapter: Path) -> None:
    """Refuse halves: A without B, a magnitude that the settings do not announce, a saved module that is not there."""
    for target, change in changes.items():
        filled = change.keys() - {"replacement", "bias"}
        pairs = [{f"{kind}a", f"{kind}b"} for kind in ("", "embedding ")]
        if filled and filled - {"magnitude"} not in pairs:
            raise CheckpointError(f"{adapter}: {target} has {' and '.join(sorted(filled))} alone: save it again")
        if filled and ("magnitude" in filled) != bool(settings.get("use_dora")):
            raise CheckpointError(
                f"{adapter}: use_dora is {bool(settings.get('use_dora'))}, but {target} has "
                f"{'a' if 'magnitude' in filled else 'no'} lora_magnitude_vector: save the adapter again"
            )
    for module in settings.get("modules_to_save") or []:
        if not any(f".{module}." in f".{target}" for target in changes):
            raise CheckpointError(f"{adapter / CONFIG} names {module} in modules_to_save, but it was not saved")


def _names(source: Source) -> list[str]:
    """The source's tensors, none of them read."""
    seen: list[str] = []

    def note(name: str) -> bool:
        seen.append(name)
        return False

    for _ in source.tensors(note):
        pass
    return seen


def _setting(settings: dict[str, Any], name: str, default: str, patterns: str) -> Any:
    """A module's own value: the first pattern that its name ends in, as PEFT reads them, or the default."""
    module = name.rpartition(".")[0]
    for pattern, value in (settings.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return settings[default]


def _rank_and_scale(settings: dict[str, Any], name: str) -> tuple[int, float]:
    """r, and alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)."""
    rank = _setting(settings, name, "r", "rank_pattern")
    alpha = _setting(settings, name, "lora_alpha", "alpha_pattern")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{CONFIG}: r is {rank!r} and lora_alpha {alpha!r} for {name}: save the adapter again")
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _pieces(change: Change, get: Get) -> dict[str, "torch.Tensor"]:
    """A change's tensors; an embedding's A [r, words] and B [dim, r] turned to be a linear layer's B and A."""
    pieces = {slot: get(name) for slot, name in change.items()}
    if "embedding a" in pieces:
        pieces["b"], pieces["a"] = pieces.pop("embedding a").T, pieces.pop("embedding b").T
    return pieces


def _same(words: str, head: str, changes: dict[str, Change], settings: dict[str, Any], get: Get) -> bool:
    """Does the adapter do the same to the word embeddings and to the head?"""
    import torch

    one, other = (_pieces(changes.get(name, {}), get) for name in (words, head))
    if not one and not other:
        return True
    if one.keys() != other.keys() or "magnitude" in one:  # of words the columns are rescaled, of the head the rows
        return False
    scales = [_rank_and_scale(settings, name) for name in (words, head)]
    return scales[0] == scales[1] and all(torch.equal(one[slot], other[slot]) for slot in one)


def _applied(
    name: str, weight: "torch.Tensor", change: Change, settings: dict[str, Any], get: Get, adapter: Path
) -> "torch.Tensor":
    """The tensor with the change made, in its own dtype."""
    import torch

    from ropex.lora import merged

    pieces = _pieces(change, get)
    if weight.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedError(f"{name} is {weight.dtype}: merge the adapter into the checkpoint in 16 bits")

    def fit(slot: str, *shape: int) -> "torch.Tensor":
        if pieces[slot].shape != shape:
            raise CheckpointError(
                f"{adapter}: {change.get(slot, name)} is {list(pieces[slot].shape)} where the base and {CONFIG} make "
                f"{list(shape)}: it belongs to another base, or the vocabulary grew; merge it with PEFT"
            )
        return pieces[slot]

    value = fit("replacement", *weight.shape) if "replacement" in pieces else weight
    if pieces.keys() == {"replacement"}:
        return value.to(weight.dtype)
    rank, scale = _rank_and_scale(settings, name)
    if "bias" in pieces:
        value = value.float() + scale * fit("bias", *weight.shape).float()
    if "a" in pieces:
        value = merged(value, fit("a", rank, weight.shape[-1]), fit("b", weight.shape[0], rank), scale)
    if "magnitude" in pieces:  # DoRA (arXiv:2402.09353, equation 5): rows of length m; columns, of word embeddings
        across = 0 if "embedding a" in change else 1
        norm = torch.linalg.norm(value, dim=across)
        value = value * (fit("magnitude", *norm.shape).float() / norm).unsqueeze(across)
    return value.to(weight.dtype)
