"""Golden properties of the 13 tasks: NVIDIA's parameters, found again in the prompts' text."""

import random
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from uuid import UUID

import pytest
from transformers import PreTrainedTokenizerFast

from ropex.eval.models import encode
from ropex.eval.ruler.prompts import Prompter, Sample, make_sample, make_samples
from ropex.eval.ruler.sources import Library, Question, Sources
from ropex.eval.ruler.tasks import TASKS
from ropex.eval.ruler.wording import load_wording, load_words
from ropex.eval.ruler.words import cwe_words

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

NIAH = {  # haystack, values that are uuids, keys that are uuids, keys, values of a key, keys asked for
    "niah_single_1": ("noise", False, False, 1, 1, 1),
    "niah_single_2": ("essay", False, False, 1, 1, 1),
    "niah_single_3": ("essay", True, False, 1, 1, 1),
    "niah_multikey_1": ("essay", False, False, 4, 1, 1),
    "niah_multikey_2": ("needle", False, False, 1, 1, 1),
    "niah_multikey_3": ("needle", True, True, 1, 1, 1),
    "niah_multivalue": ("essay", False, False, 1, 4, 1),
    "niah_multiquery": ("essay", False, False, 4, 1, 4),
}


@pytest.fixture(scope="session")
def plain(prompter: Callable[..., Prompter], tokenizer: PreTrainedTokenizerFast) -> Prompter:
    return prompter(tokenizer)


def sample(task: str, length: int, prompter: Prompter, index: int = 0) -> Sample:
    return make_sample(TASKS[task], length, prompter, 0, index)


def needles(text: str) -> list[tuple[str, str]]:
    return re.findall(r"One of the special magic (?:numbers|uuids) for ([^.]+?) is: ([\w-]+)\.", text)


def is_uuid(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text)) and UUID(text).version == 4


@pytest.mark.parametrize("length", [2048, 5000])
@pytest.mark.parametrize("task", NIAH)
def test_needles_are_as_many_and_of_the_kind_that_nvidia_says(task: str, length: int, plain: Prompter) -> None:
    haystack, value_uuid, key_uuid, keys, values, queries = NIAH[task]
    for index in range(3):
        got = sample(task, length, plain, index)
        found = needles(got.text)
        stated = dict.fromkeys(key for key, _ in found)
        if haystack == "needle":
            assert len(found) > 20
        else:
            assert len(found) == keys * values
            assert len(stated) == keys
        assert len({value for _, value in found}) == len(found)
        assert all(is_uuid(value) if value_uuid else re.fullmatch(r"[1-9]\d{6}", value) for _, value in found)
        assert all(is_uuid(key) if key_uuid else "-" in key for key in stated)
        assert len(got.references) == queries * values
        kind = "uuid" if value_uuid else "number"
        one = queries * values == 1
        asked = re.search(
            rf"What (?:is|are all) the special magic {kind}{'' if one else 's'} for (.+?) mentioned in the provided "
            rf"text\? The special magic {kind}{'' if one else 's'} for (.+?) mentioned in the provided text "
            rf"{'is' if one else 'are'}$",
            got.text,
        )
        assert asked and asked[1] == asked[2]
        listed = re.split(r", and |, ", asked[1])
        assert len(listed) == queries
        by_key: dict[str, list[str]] = {}
        for key, value in found:
            by_key.setdefault(key, []).append(value)
        assert sorted(got.references) == sorted(value for key in listed for value in by_key[key])
        assert all(got.text.count(value) == 1 for value in got.references)
        assert got.text.startswith(f"{'A' if one else 'Some'} special magic {kind}")


def test_keys_are_an_adjective_and_a_noun(plain: Prompter) -> None:
    words = load_words()
    for index in range(10):
        ((key, _),) = needles(sample("niah_single_1", 1024, plain, index).text)
        assert any(
            key[:i] in words["adjective"] and key[i + 1 :] in words["noun"] for i, c in enumerate(key) if c == "-"
        )


def test_noise_is_one_line_over_and_over(plain: Prompter) -> None:
    got = sample("niah_single_1", 2048, plain)
    lines = got.text.split("\n")[1:-1]
    assert set(lines) - {load_wording().niah_noise} == {next(line for line in lines if got.references[0] in line)}


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_1", "niah_multivalue"])
def test_essays_are_read_from_their_start_and_again_past_their_end(task: str, plain: Prompter) -> None:
    essays = plain.sources.essays
    assert essays is not None
    words = " ".join(essays.sentences).split()
    for length in (1024, 4096):
        got = sample(task, length, plain)
        body = got.text.split("afterwards.\n")[1].rsplit("\nWhat ", 1)[0]
        rest = re.sub(r" ?One of the special magic \w+ for [^.]+? is: [\w-]+\.", "", body).split()
        assert rest == (words * (len(rest) // len(words) + 1))[: len(rest)]
        for match in re.finditer(r"(\S+) One of the special", body):
            assert match[1].rstrip("\"')")[-1] in ".!?" or match.end() > len(body) - 90
    assert len(rest) > len(words)


@pytest.mark.parametrize("task", [*NIAH, "qa_1"])
def test_what_is_asked_for_lies_all_over_the_window(task: str, plain: Prompter) -> None:
    places = []
    for got in make_samples(TASKS[task], 4096, plain, 0, range(40)):
        text = f"{got.references[0]} lives here" if task == "qa_1" else f": {got.references[0]}."
        places.append(got.text.index(text) / len(got.text))
        if task == "niah_single_1":
            assert places[-1] == pytest.approx(got.facts["depth"], abs=0.1)
    bins = Counter(int(5 * place) for place in places)
    assert len(bins) == 5
    assert max(bins.values()) <= 18
    if NIAH.get(task, (0, 0, 0, 0, 0, 0))[3:] == (1, 1, 1):
        assert all(b - a < 0.12 for a, b in pairwise(sorted([0.0, *places, 1.0])))


def test_the_chain_of_vt_gives_the_references(plain: Prompter) -> None:
    for index in range(4):
        got = sample("vt", 1500, plain, index)
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
                assert part.rstrip().endswith("they are:  " + " ".join(held))
        assert got.text.endswith("they are: ")
        assert "5 variables are assigned" in asked
        assert example.count("The grass") > 5


def test_the_example_of_vt_takes_500_tokens_without_its_answer(plain: Prompter) -> None:
    got = sample("vt", 4096, plain)
    question = got.text.split("\n\nMemorize")[0].rsplit(" they are: ", 1)[0] + " they are: "
    assert 470 < len(encode(plain.tokenizer, question)) <= 505


def numbered(block: str) -> list[str]:
    entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", block)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


@pytest.mark.parametrize(
    ("length", "often", "seldom", "solved"),
    [(2500, 6, 1, (20, 3, 1)), (4095, 6, 1, (20, 3, 1)), (4096, 30, 3, (40, 10, 3)), (6000, 30, 3, (40, 10, 3))],
)
def test_cwe_repeats_its_words_as_ruler_says(
    length: int, often: int, seldom: int, solved: tuple[int, int, int], plain: Prompter
) -> None:
    got = sample("cwe", length, plain)
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


def test_cwe_goes_on_past_the_end_of_the_word_list(plain: Prompter) -> None:
    request = plain.request(TASKS["cwe"], 300_000, 0, 0)
    few = TASKS["cwe"].draft(len(cwe_words()) + 40, request)
    more = TASKS["cwe"].draft(len(cwe_words()) + 90, request)
    for draft, extra in ((few, 40), (more, 90)):
        listed = {word for word in re.split(r" ?\d+\. ", draft.text.split("\n")[-2]) if word}
        assert len(listed) == len(set(cwe_words())) + extra
        assert listed > set(cwe_words())


@pytest.mark.parametrize("length", [300, 512, 4096])
def test_fwe_counts_fall_with_the_square_of_the_rank(length: int, plain: Prompter) -> None:
    got = sample("fwe", length, plain)
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
    assert body[1].split() != sorted(body[1].split())


@pytest.mark.parametrize(("task", "own"), [("qa_1", 1), ("qa_2", 10)])
def test_questions_come_with_their_documents_in_an_order_of_their_own(task: str, own: int, plain: Prompter) -> None:
    library = getattr(plain.sources, TASKS[task].needs or "")
    orders = set()
    for index in range(6):
        got = sample(task, 1500, plain, index)
        question = library.questions[index]
        shown = re.findall(r"Document (\d+):\n(.*?)(?=\n\nDocument \d+:\n|\n\nAnswer the question)", got.text, re.S)
        assert [int(number) for number, _ in shown] == list(range(1, len(shown) + 1))
        texts = [text for _, text in shown]
        assert len(question.context) == own
        context = [library.documents[i] for i in question.context]
        assert set(context) <= set(texts) <= set(library.documents)
        assert len(set(texts)) == len(texts)
        if task == "qa_1":  # those about the same first, then others
            near = {library.documents[i] for i in question.more}
            assert len(near) == 4
            assert near <= set(texts) or set(texts) <= near | set(context)
        assert got.text.endswith(f"Question: {question.query} Answer:")
        assert got.references == question.answers
        orders.add(tuple(texts.index(text) for text in context))
    assert len(orders) > 3


def test_documents_are_repeated_where_there_are_too_few(plain: Prompter) -> None:
    got = sample("qa_1", 6000, plain)
    assert plain.sources.squad is not None
    assert got.text.count("Document ") > len(plain.sources.squad.documents)
    assert got.fill > 0.95


def test_documents_of_any_size_leave_little_room(tokenizer: PreTrainedTokenizerFast) -> None:
    """RX-41. The gold one still lies anywhere, and no document is there twice."""
    rng = random.Random(0)
    texts = [f"Person{i} lives here. " + "river stone lamp " * rng.randint(10, 300) for i in range(600)]
    questions = [Question(f"Who is {i}?", [f"Person{i}"], [i], [i], [i + 1, i + 2]) for i in range(40)]
    made = Prompter(tokenizer, sources=Sources(squad=Library(texts, questions)))
    got = make_samples(TASKS["qa_1"], 2048, made, 0, range(40))
    assert min(one.fill for one in got) > 0.95
    assert {int(4 * one.facts["depth"]) for one in got} == {0, 1, 2, 3, 4}
    assert all(max(Counter(re.findall(r"Person\d+", one.text)).values()) == 1 for one in got)


def test_a_document_larger_than_the_window_is_passed_over(tokenizer: PreTrainedTokenizerFast) -> None:
    """The others are used up, and then repeated as they are without it."""
    texts = [f"Person{i} lives here. " + "river stone lamp " * 20 for i in range(8)] + ["copper voice " * 9000]
    made = Prompter(tokenizer, sources=Sources(squad=Library(texts, [Question("Who?", ["Person3"], [3], [3], [])])))
    for length in (1024, 4096):
        got = sample("qa_1", length, made)
        assert got.fill > 0.9
        assert all(f"Person{i} " in got.text for i in range(8)) or length == 1024


def test_the_depth_of_a_question_is_that_of_its_gold_documents(plain: Prompter) -> None:
    library = plain.sources.hotpot
    assert library is not None
    depths = []
    for got in make_samples(TASKS["qa_2"], 4096, plain, 0, range(20)):
        question = library.questions[got.index]
        (gold,) = question.gold
        assert len(question.context) == 10
        shown = re.findall(r"Document \d+:\n(.*?)(?=\n\nDocument \d+:\n|\n\nAnswer the question)", got.text, re.S)
        assert got.facts["depth"] == shown.index(library.documents[gold]) / (len(shown) - 1)
        depths.append(got.facts["depth"])
    assert len({int(4 * depth) for depth in depths}) >= 4


def test_questions_start_again_past_the_last(plain: Prompter) -> None:
    assert plain.sources.squad is not None
    count = len(plain.sources.squad.questions)
    assert count == 40  # those without an answer are left out
    first, again = sample("qa_1", 1500, plain, 3), sample("qa_1", 1500, plain, count + 3)
    assert first.references == again.references
    assert first.text != again.text


def test_the_flavours_size_by_their_own_rules(
    prompter: Callable[..., Prompter], tokenizer: PreTrainedTokenizerFast
) -> None:
    """lm-eval's haystacks grow in steps, its cwe has no example, and its essays and documents are not repeated."""
    made = prompter(tokenizer, flavour="lm-eval")
    for length, step in ((2000, 5), (5000, 25)):
        lines = sample("niah_single_1", length, made).text.count("The grass is green")
        assert lines % step == 0
        most = sample("niah_single_1", length, prompter(tokenizer)).text.count("The grass is green")
        assert lines <= most < lines + step
    assert sample("vt", 3000, made).text.split("\n\n\n\n")[1].count("The grass") % 10 == 0
    cwe = sample("cwe", 6000, made).text
    assert cwe.count("Question:") == 1
    assert "above list?\n\nAnswer: The top" in cwe
    assert len(set(numbered(cwe.split("\n")[1]))) % 10 == 0
    assert sample("niah_single_2", 9000, made).fill < 0.5
    assert sample("qa_1", 9000, made).text.count("Document ") == len(made.sources.squad.documents)
    assert "assgined" in sample("vt", 3000, made).text


def test_drafts_of_more_units_are_longer(plain: Prompter) -> None:
    """The search relies on it."""
    for task in TASKS.values():
        request = plain.request(task, 4096, 0, 0)
        low, _ = task.bounds(request)
        sizes = [len(task.draft(low + n, request).text) for n in range(0, 600, 50)]
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[-1]
