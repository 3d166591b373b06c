"""The texts that some tasks read: essays, and the documents and questions of SQuAD and HotpotQA."""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropex.errors import DataError
from ropex.text import read_all

_ENDS = (".", "!", "?", '."', '!"', '?"', ".'", "!'", "?'", ".)", "!)", "?)")


@dataclass(frozen=True)
class Essays:
    """Sentences; joined by single spaces they are the essays. ends: the words up to each sentence's end."""

    sentences: list[str]
    ends: list[int]

    @property
    def words(self) -> int:
        return self.ends[-1]

    def first(self, words: int) -> list[str]:
        """The sentences of the first `words` words, from the start again as often as needed; the last may be cut."""
        rounds, rest = divmod(words, self.words)
        whole = bisect_right(self.ends, rest)
        begun = rest - (self.ends[whole - 1] if whole else 0)
        cut = [" ".join(self.sentences[whole].split(" ")[:begun])] if begun else []
        return self.sentences * rounds + self.sentences[:whole] + cut


@dataclass(frozen=True)
class Question:
    """A question, its answers, and documents by number: that it comes with, of which some hold the answer (gold), and
    more that are about the same."""

    query: str
    answers: list[str]
    context: list[int]
    gold: list[int]
    more: list[int]


@dataclass(frozen=True)
class Library:
    """Documents, each once, and the questions about them in the order of the file."""

    documents: list[str]
    questions: list[Question]


@dataclass(frozen=True)
class Sources:
    """What was given; None where it was not."""

    essays: Essays | None = None
    squad: Library | None = None
    hotpot: Library | None = None

    def digests(self) -> dict[str, str]:
        """A hash of the content of each source that is there."""
        found = {"essays": self.essays, "squad": self.squad, "hotpot": self.hotpot}
        return {
            name: hashlib.sha256(repr(source).encode()).hexdigest()[:16] for name, source in found.items() if source
        }


_Parsed = tuple[list[str], list[tuple[str, list[str], list[str], list[str], list[str]]]]
"""Texts; and for each question its query, its answers, its own texts, the gold ones of these, and those about the same.
"""

FILES = {"essays": "essays.txt", "squad": "squad.json", "hotpot": "hotpot.json"}
"""Their names in the cache folder."""


def cache_folder() -> Path:
    """Where data is kept: $ROPEX_CACHE/ruler, by default ~/.cache/ropex/ruler. It may be deleted at any time."""
    return Path(os.environ.get("ROPEX_CACHE") or Path.home() / ".cache" / "ropex").expanduser() / "ruler"


def find_sources(
    needs: Collection[str], essays: str | Path | None, squad: Path | None, hotpot: Path | None
) -> tuple[Sources, dict[str, str]]:
    """The sources that are needed, from the paths given or the cache folder; and what is missing, and what to do.

    essays "pg" are those of the cache folder. Raises DataError for a path that was given and cannot be used.
    """
    given = {"essays": None if essays == "pg" else essays, "squad": squad, "hotpot": hotpot}
    readers: dict[str, Callable[[Path], Any]] = {"essays": read_essays, "squad": read_squad, "hotpot": read_hotpot}
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in sorted(needs):
        path = Path(given[name] or cache_folder() / FILES[name])
        if given[name] or path.exists():
            found[name] = readers[name](path)
        else:
            missing[name] = f"no {name} here: give --{name} PATH, or fetch them once with `ropex eval ruler --prepare`"
    return Sources(**found), missing


def read_essays(path: Path) -> Essays:
    """Sentences of a text file, of a folder of them in name order, or of a JSON object with a "text".

    White space becomes single spaces. A sentence ends at a word that ends in a full stop, an exclamation or a question
    mark, also with a quotation mark or bracket after it. Raises DataError where there is none.
    """
    if path.suffix.lower() == ".json":
        content = _json(path)
        if not isinstance(content, dict) or not isinstance(content.get("text"), str):
            raise DataError(f'{path} holds no essays: give an object with a "text", or a .txt file')
        text = content["text"]
    else:
        text = " ".join(document.text for document in read_all([path]))
    sentences: list[str] = []
    ends: list[int] = []
    words = text.split()
    for end, word in enumerate(words, 1):
        if word.endswith(_ENDS) or end == len(words):
            sentences.append(" ".join(words[ends[-1] if ends else 0 : end]))
            ends.append(end)
    if not sentences:
        raise DataError(f"{path} holds no words: give essays to hide needles in")
    return Essays(sentences, ends)


def read_squad(path: Path) -> Library:
    """SQuAD 2.0's own JSON: paragraphs are the documents, and questions without an answer are left out."""

    def parse(data: Any) -> _Parsed:
        texts: list[str] = []
        questions: list[tuple[str, list[str], list[str], list[str], list[str]]] = []
        for article in data["data"]:
            about = [paragraph["context"] for paragraph in article["paragraphs"]]
            texts += about
            for paragraph in article["paragraphs"]:
                own = paragraph["context"]
                others = [text for text in about if text != own]
                for question in paragraph["qas"]:
                    if not question.get("is_impossible", False):
                        answers = [answer["text"] for answer in question["answers"]]
                        questions.append((question["question"], answers, [own], [own], others))
        return texts, questions

    return _library(path, parse, "SQuAD's dev-v2.0.json")


def read_hotpot(path: Path) -> Library:
    """HotpotQA's distractor JSON: a document is a title, a line break and its sentences; the gold ones are those of its
    "supporting_facts", or all where there are none."""

    def parse(data: Any) -> _Parsed:
        texts: list[str] = []
        questions: list[tuple[str, list[str], list[str], list[str], list[str]]] = []
        for entry in data:
            own = [f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]]
            texts += own
            named = {title for title, _ in entry.get("supporting_facts", ())}
            gold = [text for text, (title, _) in zip(own, entry["context"], strict=True) if title in named]
            questions.append((entry["question"], [entry["answer"]], own, gold or own, []))
        return texts, questions

    return _library(path, parse, "hotpot_dev_distractor_v1.json")


def _library(path: Path, parse: Callable[[Any], _Parsed], name: str) -> Library:
    try:
        texts, found = parse(_json(path))
        for query, answers, own, _, others in found:
            if not own or not all(isinstance(text, str) for text in (query, *answers, *own, *others)):
                raise TypeError(f"the question {query!r:.60} has no context, or parts that are no text")
            "".join((query, *answers, *own, *others)).encode()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is not laid out as {name} is ({type(error).__name__}: {error}): give that") from error
    documents = sorted(set(texts))
    number = {text: i for i, text in enumerate(documents)}

    def numbers(wanted: Sequence[str]) -> list[int]:
        return [number[text] for text in dict.fromkeys(wanted)]

    questions = [
        Question(query, answers, numbers(own), numbers(gold), numbers(others))
        for query, given, own, gold, others in found
        if (answers := [answer for answer in given if answer.strip()])
    ]
    if not questions:
        raise DataError(f"{path} holds no question that has an answer: give {name}")
    return Library(documents, questions)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): give the file that was downloaded") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): download it again") from error
