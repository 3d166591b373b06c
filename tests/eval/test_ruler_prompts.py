"""What a RULER sample must be, derived again from the prompt's own text."""

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from transformers import PreTrainedTokenizerFast

from ropex.errors import OptionError
from ropex.eval.ruler import prompts
from ropex.eval.ruler.prompts import Prompter, Sample, make_sample, require_room
from ropex.eval.ruler.tasks import TASKS, Request, cwe_words, get_task
from ropex.eval.ruler.wording import load_wording, load_words

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

LENGTHS = {"niah_single_1": 512, "vt": 1024, "cwe": 2500, "fwe": 512}
CASES = [(task, factor * length) for task, length in LENGTHS.items() for factor in (1, 2, 5)]
TOKENIZERS = [
    {},
    {"bos": True},
    {"chat": True},
    {"bos": True, "chat": True},
    {"metaspace": True},
    {"size": 300},
]


def sample(task: str, length: int, tokenizer: PreTrainedTokenizerFast, index: int = 0, seed: int = 0) -> Sample:
    return make_sample(TASKS[task], length, Prompter(tokenizer), seed, index)


@pytest.mark.parametrize("kind", TOKENIZERS, ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_prompt_and_answer_fill_the_length_and_never_exceed_it(
    task: str, kind: dict, tokenizers: Callable[..., PreTrainedTokenizerFast]
) -> None:
    tokenizer = tokenizers(**kind)
    prompter = Prompter(tokenizer, chat_template=kind.get("chat", False))
    for length in (2048, 4096, 9000):
        try:
            require_room(TASKS[task], length, prompter, 0)
        except OptionError:
            assert length < 4096 or (task == "cwe" and "size" in kind)
            continue
        for index in range(3):
            got = make_sample(TASKS[task], length, prompter, 0, index)
            used = len(got.input_ids) + TASKS[task].tokens_to_generate
            assert 0.9 * length <= used <= length
            assert got.fill == used / length


@pytest.mark.parametrize(("bos", "chat"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_prompt_has_one_bos_if_tokenizer_or_template_add_it(
    bos: bool, chat: bool, tokenizers: Callable[..., PreTrainedTokenizerFast]
) -> None:
    prompter = Prompter(tokenizers(bos=bos, chat=chat), chat_template=chat)
    ids = make_sample(TASKS["niah_single_1"], 512, prompter, 0, 0).input_ids
    assert ids.count(0) == (bos or chat)
    assert ids[0] == 0 or not (bos or chat)
    assert 1 not in ids


def test_the_chat_template_holds_the_text_and_the_answer_starts_with_the_prefix(
    tokenizers: Callable[..., PreTrainedTokenizerFast],
) -> None:
    text = make_sample(TASKS["fwe"], 512, Prompter(tokenizers(chat=True), True), 0, 0).text
    assert text.startswith("<s><u>Read the following")
    assert "above coded text?</u><a>Answer: According" in text
    with pytest.raises(OptionError, match="no chat template"):
        Prompter(tokenizers(), chat_template=True)


@pytest.mark.parametrize(("task", "length"), CASES)
def test_the_ids_encode_the_whole_text(task: str, length: int, tokenizer: PreTrainedTokenizerFast) -> None:
    got = sample(task, length, tokenizer)
    assert tokenizer.decode(got.input_ids) == got.text


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_nothing_but_its_arguments(
    task: str, tokenizer: PreTrainedTokenizerFast, tokenizers: Callable[..., PreTrainedTokenizerFast]
) -> None:
    length = LENGTHS[task]
    first = sample(task, length, tokenizer, index=3)
    random.seed(1)
    used = Prompter(tokenizers())
    make_sample(TASKS[task], 2 * length, used, 0, 0)
    assert make_sample(TASKS[task], length, used, 0, 3) == first
    texts = {
        sample(task, length, tokenizer, index, seed).text for index in range(5) for seed in range(2)
    }  # fmt: skip
    assert len(texts) == 10


@pytest.mark.parametrize("task", TASKS)
def test_pieces_are_measured_once_and_the_prompt_twice_at_most(
    task: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    plain = prompts.encode
    monkeypatch.setattr(prompts, "encode", lambda tok, text: seen.append(text) or plain(tok, text))
    got = sample(task, 4096, tokenizer)
    assert max(Counter(seen).values()) == 1 or Counter(seen).most_common(1)[0][0] == "\n"
    assert sum(len(text) > len(got.text) / 2 for text in seen) <= 2


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1, 60, 100, 249])
def test_lengths_too_short_are_refused_at_once(task: str, length: int, tokenizer: PreTrainedTokenizerFast) -> None:
    prompter = Prompter(tokenizer)
    start = time.perf_counter()
    for refused in (require_room, lambda *args: make_sample(*args, 0)):
        with pytest.raises(OptionError, match="use") as caught:
            refused(TASKS[task], length, prompter, 0)
        assert "\n" not in str(caught.value)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("task", TASKS)
def test_the_shortest_length_that_is_not_refused_gives_a_sample(task: str, tokenizer: PreTrainedTokenizerFast) -> None:
    prompter = Prompter(tokenizer)
    for length in range(250, 2000, 50):
        try:
            require_room(TASKS[task], length, prompter, 0)
        except OptionError:
            continue
        assert make_sample(TASKS[task], length, prompter, 0, 0).fill <= 1
        return
    raise AssertionError("no length below 2000 fits")


def test_an_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(OptionError, match="niah_single_1, vt, cwe, fwe"):
        get_task("niah")


def test_tokens_to_generate_are_rulers() -> None:
    assert {name: task.tokens_to_generate for name, task in TASKS.items()} == {
        "niah_single_1": 128, "vt": 30, "cwe": 120, "fwe": 50,
    }  # fmt: skip


@pytest.mark.parametrize("length", [512, 1024, 5000])
def test_niah_has_one_needle_in_noise_and_asks_for_its_key(length: int, tokenizer: PreTrainedTokenizerFast) -> None:
    for index in range(4):
        got = sample("niah_single_1", length, tokenizer, index)
        ((key, value),) = re.findall(r"special magic numbers for (\S+) is: (\d{7})\.", got.text)
        assert got.references == [value]
        assert got.text.count(value) == 1
        assert got.text.endswith(f"The special magic number for {key} mentioned in the provided text is")
        assert f"What is the special magic number for {key} mentioned" in got.text
        adjective, noun = next(
            (key[:i], key[i + 1 :]) for i, c in enumerate(key) if c == "-" and key[:i] in load_words()["adjective"]
        )
        assert noun in load_words()["noun"]
        assert adjective
        lines = got.text.split("\n")[1:-1]
        assert set(lines) - {load_wording().niah_noise} == {next(line for line in lines if value in line)}


def test_needles_lie_all_over_the_window(tokenizer: PreTrainedTokenizerFast) -> None:
    places = []
    for index in range(20):
        got = sample("niah_single_1", 4096, tokenizer, index)
        places.append(got.text.index("One of the special") / len(got.text))
        assert places[-1] == pytest.approx(got.facts["depth"], abs=0.1)
    assert all(b - a < 0.12 for a, b in pairwise(sorted([0.0, *places, 1.0])))


def test_the_chain_of_vt_gives_the_references(tokenizer: PreTrainedTokenizerFast) -> None:
    for index in range(4):
        got = sample("vt", 1500, tokenizer, index)
        example, asked = got.text.split("\n\nMemorize")
        for part, letters in ((example, 3), (asked, 5)):
            assignments = re.findall(r"VAR ([A-Z]+) = (VAR )?([A-Z]+|\d{5})\b", part)
            (value,) = re.findall(r"assigned the value (\d{5}) in the text", part)
            held: dict[str, str] = {}
            for name, copied, source in assignments:  # in the text's order, as a reader goes
                held[name] = held[source] if copied else source
            assert list(held) == [name for name, held_value in held.items() if held_value == value]
            assert len(assignments) == len(held) == 5
            assert all(len(name) == letters for name in held)
            if part is asked:
                assert list(held) == got.references
            else:
                assert part.rstrip().endswith("they are: " + " ".join(held))
        assert got.text.endswith("they are:")
        assert "5 variables" in asked


def numbered(block: str) -> list[str]:
    entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", block)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


@pytest.mark.parametrize(
    ("length", "often", "seldom", "solved"),
    [(2500, 6, 1, (20, 3, 1)), (4095, 6, 1, (20, 3, 1)), (6000, 30, 3, (40, 10, 3))],
)
def test_cwe_repeats_its_words_as_ruler_says(
    length: int, often: int, seldom: int, solved: tuple[int, int, int], tokenizer: PreTrainedTokenizerFast
) -> None:
    got = sample("cwe", length, tokenizer)
    rows = got.text.split("\n")
    assert len(rows) == 6  # twice: the task, the list, the question
    counts = Counter(numbered(rows[1]))
    answer = numbered(rows[2].split("list are: ")[1])
    assert len(counts) == solved[0]
    assert Counter(counts.values()) == {solved[1]: 10, solved[2]: solved[0] - 10}
    assert {word for word, count in counts.items() if count == solved[1]} == set(answer)
    counts = Counter(numbered(rows[4]))
    assert set(counts.values()) == {often, seldom}
    assert {word for word, count in counts.items() if count == often} == set(got.references)
    assert len(set(got.references)) == 10
    assert set(counts) <= set(cwe_words())
    assert got.text.endswith("in the list are:")


@pytest.mark.parametrize("length", [300, 512, 4096])
def test_fwe_counts_fall_with_the_square_of_the_rank(length: int, tokenizer: PreTrainedTokenizerFast) -> None:
    got = sample("fwe", length, tokenizer)
    body = re.search(r"coded words\. (.*)\nQuestion", got.text)
    assert body
    ranked = Counter(body[1].split()).most_common()
    assert ranked[0][0] == "..."
    assert [word for word, _ in ranked[1:4]] == got.references
    assert all(a > b for (_, a), (_, b) in pairwise(ranked[:5]))
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
    assert len(ranked) <= (length - 50) // 50
    top = ranked[0][1]
    for rank, (_, count) in enumerate(ranked, 1):
        assert top / rank**2 - 1 <= count <= (top + 1) / rank**2
    unshuffled = sorted(body[1].split())
    assert body[1].split() != unshuffled


def test_drafts_of_more_units_are_longer(tokenizer: PreTrainedTokenizerFast) -> None:
    """The search relies on it."""
    for name, task in TASKS.items():
        request = Request(name, 4096, 0, 0, Prompter(tokenizer).count)
        sizes = [len("".join(task.draft(task.least_units + n, request).pieces)) for n in range(0, 60, 5)]
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[-1]
