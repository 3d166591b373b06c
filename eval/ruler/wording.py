"""The wording of RULER's prompts, read from the installed lm-eval package and from wonderwords.

lm-eval's task modules are read, not imported: importing them fetches tokenizer data from the network, and
they load tokenizers with remote code trusted. Only literals are taken from their syntax trees.
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ropex.errors import OptionError, UnsupportedError


@dataclass(frozen=True)
class Wording:
    """Templates with named fields ({context}, {query}, ...) as lm-eval names them; `{}` fields in order."""

    version: str
    niah_template: str  # {type_needle_v}, {context}, {query}; for several values
    niah_template_one: str  # the same for one value
    niah_prefix: str  # {} the kind of value, {} the keys; for several values
    niah_prefix_one: str
    niah_needle: str  # {type_needle_v}, {key}, {value}
    niah_noise: str
    vt_template: str  # {context}, {query}
    vt_prefix: str  # {num_v}, {query}
    vt_noise: str
    vt_first: str  # {} the variable, {} its value
    vt_hop: str  # {} the variable, {} the one that it copies
    cwe_template: str  # {context}
    cwe_prefix: str
    cwe_entry: str  # {} the number, {} the word
    fwe_template: str  # {context}
    fwe_prefix: str
    qa_template: str  # {context}, {query}
    qa_prefix: str
    qa_document: str  # {i} the number, {document}
    vt_join: str = " "  # between vt's lines
    vt_gap: str = "\n\n\n\n"  # between vt's worked example and its question
    vt_end: str = ""  # after vt's prefix, before the answer
    cwe_gap: str = ""  # between the prefix of cwe's worked example and its answer
    cwe_delimiter: str = "\n\n"  # between cwe's question and the answer's prefix


@dataclass(frozen=True)
class Departure:
    """A place where lm-eval's wording is not NVIDIA's: in `field` of the wording, `theirs` stands for `ours`."""

    name: str
    field: str
    lm_eval: str
    nvidia: str


DEPARTURES = (
    Departure("vt-spelling", "vt_prefix", "assgined", "assigned"),
    Departure("vt-line-ends", "vt_noise", "\n", ""),
    Departure("vt-join", "vt_join", " ", "\n"),
    Departure("vt-gap", "vt_gap", "\n\n\n\n", "\n\n"),
    Departure("vt-end", "vt_end", "", " "),
    Departure("cwe-gap", "cwe_gap", "", " "),
    Departure("cwe-delimiter", "cwe_delimiter", "\n\n", " "),
)
"""NVIDIA's RULER at c3f5e3b against lm-eval 0.4.13. What differs beyond the words is in `flavours`."""


@cache
def load_wording(nvidia: bool = True) -> Wording:
    """Read the templates once: lm-eval's, or NVIDIA's by the table of departures.

    OptionError without lm-eval, UnsupportedError if its layout has changed.
    """
    if nvidia:
        wording = load_wording(nvidia=False)
        for departure in DEPARTURES:
            text = getattr(wording, departure.field)
            changed = text.replace(departure.lm_eval, departure.nvidia) if departure.lm_eval else departure.nvidia
            wording = replace(wording, **{departure.field: changed})
        return wording
    version = importlib.metadata.version("lm_eval") if lm_eval_folder() else ""
    try:
        return _read(lm_eval_folder() / "tasks" / "ruler", version)
    except (OSError, SyntaxError, LookupError, ValueError, TypeError, StopIteration) as error:
        raise UnsupportedError(
            f"lm-eval {version} words its RULER tasks in a place that ropex does not know: pip install lm-eval==0.4.13"
        ) from error


def lm_eval_folder() -> Path:
    """Where the installed lm-eval lies; it is not imported."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise OptionError("the RULER tasks need lm-eval: pip install lm-eval wonderwords==2.2.0")
    return Path(spec.submodule_search_locations[0])


@cache
def load_words() -> dict[str, tuple[str, ...]]:
    """wonderwords' lists by part of speech ("noun", "adjective", "verb"), sorted and free of repetitions."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise OptionError("the RULER tasks need wonderwords: pip install wonderwords==2.2.0") from error
    source = RandomWord()
    kinds = ("noun", "adjective", "verb")
    return {kind: tuple(sorted(set(source.filter(include_categories=[kind])))) for kind in kinds}


def _read(folder: Path, version: str) -> Wording:
    niah, common = _tree(folder / "niah_utils.py"), _tree(folder / "prepare_niah.py")
    vt, cwe, fwe, qa = (_tree(folder / f"{task}_utils.py") for task in ("vt", "cwe", "fwe", "qa"))
    template = one = _assigned(niah, "TEMPLATE")
    for old, new in _replacements(_function(common, "generate_input_output"), "template"):
        one = one.replace(old, new)
    prefix_one, prefix = _prefixes(_function(common, "generate_samples"))
    vt_config, cwe_config, fwe_config, qa_config = (
        _assigned(vt, "CONFIG")["variable_tracking"],
        *(_assigned(tree, "CONFIG") for tree in (cwe, fwe, qa)),
    )
    vt_first, vt_hop = _formatted(_function(vt, "generate_chains"))
    (cwe_entry,) = _formatted(_function(cwe, "get_example"))
    return Wording(
        version=version,
        niah_template=template,
        niah_template_one=one,
        niah_prefix=prefix,
        niah_prefix_one=prefix_one,
        niah_needle=_assigned(common, "NEEDLE"),
        niah_noise=_assigned(_function(common, "get_haystack"), "haystack"),
        vt_template=vt_config["template"],
        vt_prefix=vt_config["answer_prefix"],
        vt_noise=_assigned(_function(vt, "generate_input_output"), "noise"),
        vt_first=vt_first,
        vt_hop=vt_hop,
        cwe_template=cwe_config["template"],
        cwe_prefix=cwe_config["answer_prefix"],
        cwe_entry=cwe_entry,
        fwe_template=fwe_config["template"],
        fwe_prefix=fwe_config["answer_prefix"],
        qa_template=qa_config["template"],
        qa_prefix=qa_config["answer_prefix"],
        qa_document=_assigned(qa, "DOCUMENT_PROMPT"),
    )


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def _assigned(tree: ast.AST, name: str) -> Any:
    """The first literal assigned to `name` (a call or a name assigned to it is passed over)."""
    for node in _in_order(tree, ast.Assign):
        if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                continue
    raise LookupError(name)


def _formatted(tree: ast.AST) -> list[str]:
    """The f-strings under `tree` in source order, each field turned into {}."""
    return [_template(node) for node in _in_order(tree, ast.JoinedStr)]


def _template(node: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def _prefixes(tree: ast.AST) -> tuple[str, str]:
    """The answer prefixes for one value and for several: what the conditional under the key "gen_prefix" gives."""
    for node in _in_order(tree, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            named = isinstance(key, ast.Constant) and key.value == "gen_prefix"
            if named and isinstance(value, ast.IfExp):
                branches = (value.body, value.orelse)
                one, several = (_template(branch) for branch in branches if isinstance(branch, ast.JoinedStr))
                return one, several
    raise LookupError("gen_prefix")


def _replacements(tree: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The (old, new) literals of the `name.replace(old, new)` calls, in source order."""
    for node in _in_order(tree, ast.Call):
        function = node.func
        if (
            isinstance(function, ast.Attribute)
            and function.attr == "replace"
            and isinstance(function.value, ast.Name)
            and function.value.id == name
        ):
            old, new = (ast.literal_eval(argument) for argument in node.args)
            yield old, new


def _in_order(tree: ast.AST, kind: Callable[..., Any]) -> list[Any]:
    found = [node for node in ast.walk(tree) if isinstance(node, kind)]  # type: ignore[arg-type]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))
