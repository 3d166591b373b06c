"""What a RULER sample must be, derived again from the prompt's own text."""

import random
import re
import time
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from ropex.errors import OptionError
from ropex.eval.models import encode
from ropex.eval.ruler.flavours import FLAVOURS
from ropex.eval.ruler.prompts import Prompter, Sample, make_sample, make_samples, require_room
from ropex.eval.ruler.sources import Essays, Library, Question, Sources
from ropex.eval.ruler.tasks import TASKS, get_tasks

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

Make = Callable[..., Prompter]
TOKENIZERS = [
    {},
    {"bos": True},
    {"chat": True},
    {"bos": True, "chat": True},
    {"metaspace": True},
    {"uncut": True},
    {"llama3": True},
    {"size": 300},
]


def sample(task: str, length: int, prompter: Prompter, index: int = 0, seed: int = 0) -> Sample:
    return make_sample(TASKS[task], length, prompter, seed, index)


@pytest.fixture(scope="session")
def plain(prompter: Make, tokenizer: PreTrainedTokenizerFast) -> Prompter:
    return prompter(tokenizer)


@pytest.mark.parametrize("kind", TOKENIZERS, ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_prompt_and_answer_fill_the_length_and_never_exceed_it(
    task: str, kind: dict, tokenizers: Callable[..., PreTrainedTokenizerFast], prompter: Make
) -> None:
    """RX-41. A length is refused where whole lines or documents cannot fill it, and no other one is for that reason."""
    made = prompter(tokenizers(**kind), chat=kind.get("chat", False))
    for length in (256, 512, 1000, 2048, 4096, 5000):
        try:
            require_room(TASKS[task], length, made, 0, 4)
        except OptionError as error:
            if "shortest prompt" in str(error):
                assert length < 4096 or (task == "cwe" and (length == 4096 or "size" in kind))
            else:
                assert length < 1000
                assert min(one.fill for one in make_samples(TASKS[task], length, made, 0, range(4))) < 0.9
            continue
        for got in make_samples(TASKS[task], length, made, 0, range(4)):
            used = len(got.input_ids) + TASKS[task].tokens_to_generate
            assert 0.9 * length <= used <= length
            assert got.fill == used / length


@pytest.mark.parametrize("kind", TOKENIZERS, ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_the_ids_are_those_of_the_whole_text(
    task: str, kind: dict, tokenizers: Callable[..., PreTrainedTokenizerFast], prompter: Make
) -> None:
    made = prompter(tokenizers(**kind), chat=kind.get("chat", False))
    try:
        got = make_samples(TASKS[task], 3000, made, 0, range(4))
    except OptionError:
        assert task == "cwe"
        return
    for one in got:
        ids = encode(made.tokenizer, one.text)
        assert one.input_ids == (ids if ids[: len(made.bos)] == made.bos else [*made.bos, *ids])
        if not {"metaspace", "uncut", "size"} & set(kind):
            assert made.tokenizer.decode(ids) == one.text


@pytest.mark.parametrize(("bos", "chat"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_prompt_has_one_bos_if_tokenizer_or_template_add_it(
    bos: bool, chat: bool, tokenizers: Callable[..., PreTrainedTokenizerFast]
) -> None:
    """RX-43."""
    ids = sample("niah_single_1", 512, Prompter(tokenizers(bos=bos, chat=chat), chat)).input_ids
    assert ids.count(0) == (bos or chat)
    assert ids[0] == 0 or not (bos or chat)
    assert 1 not in ids


def test_the_chat_template_holds_the_text_and_the_answer_starts_with_the_prefix(
    tokenizers: Callable[..., PreTrainedTokenizerFast],
) -> None:
    text = sample("fwe", 512, Prompter(tokenizers(chat=True), True)).text
    assert text.startswith("<s><u>Read the following")
    assert "above coded text?</u><a>Answer: According" in text
    with pytest.raises(OptionError, match="no chat template"):
        Prompter(tokenizers(), chat_template=True)


@pytest.mark.parametrize("flavour", ["nvidia", "lm-eval"])
@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_nothing_but_its_arguments(
    task: str, flavour: str, prompter: Make, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Alone, among others, and after others of another length."""
    length = 2500
    together = make_samples(TASKS[task], length, prompter(tokenizer, flavour=flavour), 0, range(5))
    random.seed(1)
    used = prompter(tokenizer, flavour=flavour)
    make_samples(TASKS[task], 2 * length, used, 0, [7, 3])
    assert make_sample(TASKS[task], length, used, 0, 3) == together[3]
    other = make_samples(TASKS[task], length, used, 1, range(5))
    texts = {one.text for one in [*together, *other]}
    assert len(texts) == 10


@pytest.mark.parametrize("task", TASKS)
def test_most_prompts_are_tokenised_once(
    task: str, prompter: Make, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prompter(tokenizer)
    make_sample(TASKS[task], 5000, made, 0, 99)
    measured: list[str] = []
    plainly = made.encode
    monkeypatch.setattr(made, "encode", lambda texts: measured.extend(texts) or plainly(texts))
    got = make_samples(TASKS[task], 5000, made, 0, range(20))
    assert {one.text for one in got} <= set(measured)
    assert len(measured) <= 24
    assert all(one.fill > 0.97 for one in got)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1, 60, 100])
def test_lengths_too_short_are_refused_at_once(task: str, length: int, plain: Prompter) -> None:
    """RX-41."""
    start = time.perf_counter()
    for refused in (require_room, lambda *args: make_sample(*args, 0)):
        with pytest.raises(OptionError, match="will do") as caught:
            refused(TASKS[task], length, plain, 0)
        assert "\n" not in str(caught.value)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("task", TASKS)
def test_the_error_names_a_length_that_works_for_all_samples(task: str, plain: Prompter) -> None:
    """A tenth below the shortest prompts, one of them does not."""
    with pytest.raises(OptionError) as caught:
        require_room(TASKS[task], 1, plain, 0, 20)
    floor = re.search(r"takes (\d+) tokens, the answer included; (\d+) tokens will do", str(caught.value))
    assert floor
    shortest, length = map(int, floor.groups())
    require_room(TASKS[task], length, plain, 0, 20)
    assert all(0.9 <= one.fill <= 1 for one in make_samples(TASKS[task], length, plain, 0, range(20)))
    with pytest.raises(OptionError):
        require_room(TASKS[task], int(0.9 * shortest), plain, 0, 20)


def test_documents_that_cannot_fill_a_length_are_refused(prompter: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    """With a length that will do, where one is near; with documents of one token and 6,000 letters there is none."""
    for own, other, made_by in (("stone " * 40, "river " * 100, tokenizer), ("x" * 6000, "x" * 6000, words_only())):
        squad = Library([own, *[other] * 10], [Question("What is it?", ["stone"], [0], [0], [])])
        made = Prompter(made_by, sources=Sources(squad=squad))
        with pytest.raises(OptionError, match="documents leave more than a tenth of it empty") as caught:
            require_room(TASKS["qa_1"], 320, made, 0)
        assert ("too short as well" in str(caught.value)) == (made_by is not tokenizer)
        if floor := re.search(r"; (\d+) tokens will do", str(caught.value)):
            assert int(floor[1]) < 600
            require_room(TASKS["qa_1"], int(floor[1]), made, 0)


def words_only() -> PreTrainedTokenizerFast:
    """One that knows no word, so that each is a token."""
    bare = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    bare.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>")


@pytest.mark.parametrize("flavour", ["nvidia", "lm-eval"])
@pytest.mark.parametrize("length", [2048, 4096])
def test_texts_whose_tokens_are_of_uneven_length_fill_the_length_too(
    length: int, flavour: str, prompter: Make, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Prose, then numbers and letters that take many tokens a character; under lm-eval's rules, to its last step."""
    rng = random.Random(0)
    prose = ["river stone lamp winter orchard letter copper voice." for _ in range(100)]
    dense = [" ".join(str(rng.getrandbits(33)) for _ in range(8)) + "." for _ in range(300)]
    ends = [8 * (i + 1) for i in range(400)]
    texts = [f"Person{i} lives. " + rng.choice(("stone lamp ", "x9Q#")) * rng.randint(20, 200) for i in range(600)]
    questions = [Question(f"Who is {i}?", [f"Person{i}"], [i], [i], []) for i in range(40)]
    sources = Sources(essays=Essays(prose + dense, ends), squad=Library(texts, questions))
    made = Prompter(tokenizer, flavour=FLAVOURS[flavour], sources=sources)
    for task in (TASKS["niah_single_2"], TASKS["qa_1"]):
        room = length - task.tokens_to_generate
        for got in make_samples(task, length, made, 0, range(20)):
            assert len(got.input_ids) <= room
            if flavour == "nvidia":
                assert len(got.input_ids) > 0.9 * room
                continue
            request = made.request(task, length, 0, got.index)
            low, _ = task.bounds(request)
            grid = (n for n in range(low, 4000) if n == task.on_grid(n, request))
            units = next(n for n in grid if made.render(task.draft(n, request)) == got.text)
            longer = made.render(task.draft(task.after(units, request), request))
            assert longer == got.text or len(made.encode([longer])[0]) > room


def test_an_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(OptionError, match="niah_single_1, niah_single_2, .* vt, cwe, fwe, qa_1, qa_2, or all"):
        get_tasks(["niah"])
    assert get_tasks(None) == list(TASKS.values())


def test_tokens_to_generate_are_rulers() -> None:
    assert [task.tokens_to_generate for task in TASKS.values()] == [128] * 8 + [30, 120, 50, 32, 32]
