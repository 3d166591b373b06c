"""Our prompts, made again by lm-eval's own functions from the draws that are read out of our text.

Its modules are imported for real, but for what would reach for the network: nltk, whose sentences are given to it.
"""

import importlib
import importlib.metadata
import json
import random
import re
import string
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from itertools import chain
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ropex.eval.ruler.draft import Draft
from ropex.eval.ruler.prompts import Prompter
from ropex.eval.ruler.tasks import TASKS
from ropex.eval.ruler.wording import lm_eval_folder

for needed in ("lm_eval", "wonderwords", "scipy"):
    pytest.importorskip(needed)


@pytest.fixture(scope="module")
def theirs() -> Iterator[Callable[[str], Any]]:
    """theirs(name) -> lm-eval's module of that name."""
    patch = pytest.MonkeyPatch()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lm_eval", "nltk")]:
        patch.delitem(sys.modules, name)
    folder = lm_eval_folder()
    for name, path in (("lm_eval", ""), ("lm_eval.tasks", "tasks"), ("lm_eval.tasks.ruler", "tasks/ruler")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / path)]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        package.__spec__.submodule_search_locations = package.__path__
        patch.setitem(sys.modules, name, package)
    nltk: Any = types.ModuleType("nltk")
    nltk.data = types.SimpleNamespace(find=lambda name: None)
    nltk.sent_tokenize = lambda text: pytest.fail("not given")
    patch.setitem(sys.modules, "nltk", nltk)
    version = importlib.metadata.version
    patch.setattr(importlib.metadata, "version", lambda name: "99" if name == "nltk" else version(name))
    yield lambda name: importlib.import_module(f"lm_eval.tasks.ruler.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        del sys.modules[name]
    patch.undo()


class Replay:
    """Stands in for `random`: gives the draws one by one."""

    def __init__(self, samples: list[Any], shuffles: list[list[Any]] = [], letters: str = "") -> None:  # noqa: B006
        self.samples, self.shuffles, self.letters = iter(samples), iter(shuffles), iter(letters)

    def sample(self, population: Any, k: int) -> list[Any]:
        drawn = list(next(self.samples))
        assert len(drawn) == k
        return drawn

    def choices(self, population: str, k: int) -> list[str]:
        assert population in (string.ascii_lowercase, string.ascii_uppercase)
        return [next(self.letters) for _ in range(k)]

    def shuffle(self, items: list[Any]) -> None:
        order = next(self.shuffles)
        assert sorted(map(str, items)) == sorted(map(str, order))
        items[:] = order

    def Random(self, seed: int) -> "Replay":  # noqa: N802
        return self


@pytest.fixture()
def ours(prompter: Callable[..., Prompter], tokenizer: PreTrainedTokenizerFast) -> Callable[..., tuple[Draft, str]]:
    """ours(task, units, index, flavour) -> the draft and its text."""

    def make(task: str, units: int, index: int, flavour: str = "lm-eval") -> tuple[Draft, str]:
        made = prompter(tokenizer, flavour=flavour)
        draft = TASKS[task].draft(units, made.request(TASKS[task], 4096, 0, index))
        return draft, draft.text

    return make


Ours = Callable[..., tuple[Draft, str]]
Theirs = Callable[[str], Any]
NEEDLE = r"One of the special magic (?:numbers|uuids) for (.+?) is: ([\w-]+)\."


@pytest.mark.parametrize("task", [name for name in TASKS if name.startswith("niah")])
def test_niah(task: str, ours: Ours, theirs: Theirs, monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    module, calls = theirs("prepare_niah"), {}
    monkeypatch.setattr(theirs("niah_utils"), "get_tokenizer", lambda name: None)
    monkeypatch.setattr(theirs("niah_utils"), "get_haystack", lambda type_haystack: None)
    monkeypatch.setattr(theirs("niah_utils"), "generate_samples", lambda haystack, **options: [calls.update(options)])
    monkeypatch.setattr(theirs("niah_utils"), "download_dataset", list)
    getattr(theirs("niah_utils"), task)(max_seq_lengths=[4096])
    names = ("type_haystack", "type_needle_k", "type_needle_v", "template", "num_needle_v", "num_needle_q")
    options = {"num_needle_v": 1, "num_needle_q": 1} | {name: calls[name] for name in names if name in calls}
    keys_drawn = max(calls.get("num_needle_k", 1), options["num_needle_q"])
    essay = options["type_haystack"] == "essay"
    for index, flavour in enumerate(("lm-eval", "nvidia")):
        units = 150 if essay else 30
        draft, text = ours(task, units, index, flavour)
        asked = re.split(r", and |, ", re.search(r"for (.+?) mentioned in the provided text\?", text)[1])  # type: ignore[index]
        body = text.split("afterwards.\n")[1].rsplit("\nWhat ", 1)[0]
        found = list(re.finditer(NEEDLE, body))
        if options["type_haystack"] == "needle":  # the ones beyond the first asked for are hay
            needles = [match for match in found if match[1] in asked]
            hay = [(match[1], match[2]) for match in found if match[1] not in asked]
        else:
            needles, hay = found, []
        keys = list(dict.fromkeys(match[1] for match in needles))
        values = {key: [match[2] for match in needles if match[1] == key] for key in keys}
        drawn = chain.from_iterable([[key, *values[key]] for key in keys] + [list(pair) for pair in hay])
        monkeypatch.setattr(module, "generate_random", lambda kind, drawn=drawn: next(drawn))
        lines = [match[0] for match in needles]
        essays = data.sources.essays
        if essay:
            sentences = essays.first(units)
            monkeypatch.setattr(module, "cached_sent_tokenize", lambda text, made=sentences: made)
            before = [len(re.sub(rf" ?{NEEDLE}", "", body[: match.start()]).split()) for match in needles]
            ends = [0, *(len(" ".join(sentences[: i + 1]).split()) for i in range(len(sentences)))]
            places = [100 * (ends.index(words) + 1e-6) / len(sentences) for words in before]
            haystack: Any = " ".join(essays.sentences).split() * 2
        else:
            places = [body.split("\n").index(line) for line in lines]
            haystack = theirs("prepare_niah").get_haystack("needle" if hay else "repeat")
        order = lines if essay else lines[::-1]
        monkeypatch.setattr(module, "random", Replay([places, [keys.index(key) for key in asked]], [order]))
        made, answers, query = module.generate_input_output(
            units, haystack, num_needle_k=keys_drawn, random_seed=42, **options
        )
        assert made == text
        assert sorted(answers) == sorted(draft.references)
        kind = options["type_needle_v"]
        one = options["num_needle_q"] * options["num_needle_v"] == 1
        assert draft.prefix.startswith(f"The special magic {kind[:-1] if one else kind} for {query} ")


def assignments(text: str) -> tuple[list[str], str, list[int]]:
    """Of a chain: the variables, the value, and the places of its lines among all lines before each was put in."""
    lines = [
        line for line in re.split(r"(?<=again\.)\s+|(?<=\d{5})\s+(?=VAR|The)|(?<=[A-Z])\s+(?=VAR [A-Z]+ =|The)", text)
    ]
    places = [i for i, line in enumerate(lines) if line.startswith("VAR")]
    names = [line.split()[1] for line in lines if line.startswith("VAR")]
    (value,) = re.findall(r"= (\d{5})", text)
    return names, value, [place - shift for shift, place in enumerate(places)]


@pytest.mark.parametrize("flavour", ["lm-eval", "nvidia"])
def test_vt(
    flavour: str, ours: Ours, theirs: Theirs, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    module = theirs("vt_utils")
    units = 40
    draft, text = ours("vt", units, 2, flavour)
    example, asked = re.split(r"\n{2,4}(?=Memorize)", text)

    def made(part: str, is_icl: bool) -> tuple[str, list[str]]:
        context = part.split("\n\n", 1)[1].split("\nQuestion")[0]
        names, value, places = assignments(context)
        noises = context.count("The grass")
        monkeypatch.setattr(module, "random", Replay([places], letters="".join(names)))
        monkeypatch.setattr(module.np.random, "randint", lambda low, high: int(value))
        return module.generate_input_output(noises, 1, 4, is_icl=is_icl)

    solved, answer = made(example, True)
    whole = made(asked, False)
    monkeypatch.setattr(module, "generate_input_output", lambda *args, **options: whole)
    monkeypatch.setattr(module, "randomize_icl", lambda example: example)
    shown = f"{solved} {' '.join(answer)}\n\n"
    exactly = sum(len(tokenizer(part).input_ids) for part in (shown, whole[0])) + 30
    (sample,) = module.sys_vartrack_w_noise_random(
        tokenizer, 1, exactly, icl_example={"input": solved, "outputs": answer}
    )
    assert sample["outputs"] == draft.references
    if flavour == "lm-eval":
        assert text == sample["input"]
        assert draft.prefix == sample["gen_prefix"]
    else:  # the table: spelling, and white space between lines and after the example
        spelled = sample["input"].replace("assgined", "assigned")
        assert " ".join(text.split()) == " ".join(spelled.split())
        assert draft.prefix == sample["gen_prefix"].replace("assgined", "assigned") + " "


@pytest.mark.parametrize("flavour", ["lm-eval", "nvidia"])
def test_cwe(flavour: str, ours: Ours, theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    module = theirs("cwe_utils")
    draft, text = ours("cwe", 60, 1, flavour)
    example, asked = text.split("\n", 2)[0:0], text
    if flavour == "nvidia":
        *shown, last = text.split("\nBelow is")
        example, asked = shown, "Below is" + last
    drawn = [re.findall(r"\d+\. (.+?)(?= \d+\. |$)", asked.split("\n")[1])]
    words = [draft.references + [word for word in dict.fromkeys(drawn[0]) if word not in draft.references]]
    if flavour == "nvidia":
        solved = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", example[0].split("\n")[1])
        common = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", example[0].rsplit("list are: ", 1)[1])
        drawn.insert(0, solved)
        words.insert(0, common + [word for word in dict.fromkeys(solved) if word not in common])
    else:
        words.insert(0, list(module.WORDS[:40]))
        drawn.insert(0, words[0][:10] * 10 + words[0][10:] * 3)
    replay = Replay(words, drawn)
    monkeypatch.setattr(module, "random", replay)
    monkeypatch.setattr(module, "RNG", replay)
    made_example, made, answer = module.generate_input_output(60, 4096)
    assert answer == draft.references
    before, prefix = made[: made.rfind(" Answer:")], made[made.rfind(" Answer:") :]
    assert asked == before
    assert draft.prefix == prefix.strip()
    if flavour == "nvidia":  # the table: a space before the answer
        assert example[0] == made_example.replace("list are:1.", "list are: 1.")
    assert set(words[1]) <= set(module.WORDS)


def test_fwe(ours: Ours, theirs: Theirs, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> None:
    module = theirs("fwe_utils")
    draft, text = ours("fwe", 400, 1)
    drawn = text.split("coded words. ")[1].split("\nQuestion")[0].split()
    rng = random.Random(0)
    vocabulary = sorted(set(drawn) - {"..."}, key=lambda word: -drawn.count(word))
    ties = {drawn.count(word) for word in vocabulary[3:]}
    assert drawn.count(draft.references[2]) not in ties
    rest = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(4096 // 50 - len(vocabulary))]
    first = rest[0]  # its place is taken by the dots
    ranked = [first, *draft.references, *vocabulary[3:], *rest[1:]]
    monkeypatch.setattr(module, "random", Replay([], [ranked, drawn, drawn], "".join(sorted(ranked))))
    made, answer, _ = module.generate_input_output(100_000, tokenizer, num_words=400, vocab_size=4096 // 50)
    assert answer == draft.references
    assert made == f"{text} {draft.prefix}"


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_qa(task: str, ours: Ours, theirs: Theirs, monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    module = theirs("qa_utils")
    path = data.squad if task == "qa_1" else data.hotpot
    monkeypatch.setattr(module, "download_json", lambda url: json.loads(path.read_text()))
    qas, docs = (module.read_squad if task == "qa_1" else module.read_hotpotqa)(url=str(path))
    for index in range(3):
        draft, text = ours(task, 15, index)
        shown = re.findall(r"Document \d+:\n(.*?)(?=\n\nDocument \d+:\n|\n\nAnswer the question)", text, re.S)
        own, near = qas[index]["context"], qas[index].get("more_context", [])
        others = [docs.index(document) for document in shown]
        far = [number for number in others if number not in own + near]
        monkeypatch.setattr(module, "random", Replay([far], [shown]))
        made, answers = module.generate_input_output(index, 15, qas, docs)
        assert made == text
        assert list(dict.fromkeys(answers)) == draft.references
        assert draft.prefix == module.CONFIG["answer_prefix"]


def test_prefixes_are_put_where_lm_eval_puts_them(ours: Ours) -> None:
    """Its task files give what stands between a prompt and its prefix: a space, and for cwe a blank line."""
    folder = lm_eval_folder() / "tasks" / "ruler"
    delimiters = {
        path.stem: re.search(r'^target_delimiter: "(.*)"', path.read_text(), re.M) for path in folder.glob("*.yaml")
    }
    for task in ("niah_single_1", "vt", "cwe", "fwe"):
        found = delimiters[task] or delimiters["niah_single_1"]
        assert found and ours(task, 60, 0)[0].delimiter == found[1].replace("\\n", "\n")
        assert ours(task, 60, 0, "nvidia")[0].delimiter == " "
