"""Data made here in the layouts of the essays, of SQuAD and of HotpotQA."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ropex.eval.ruler.flavours import FLAVOURS
from ropex.eval.ruler.prompts import Prompter
from ropex.eval.ruler.sources import Sources, find_sources

_WORDS = ("river", "stone", "lamp", "winter", "orchard", "letter", "copper", "voice", "harbour", "saddle", "candle")


@dataclass(frozen=True)
class Data:
    """Paths to hand to an evaluation."""

    essays: Path
    squad: Path
    hotpot: Path

    @property
    def sources(self) -> Sources:
        found, missing = find_sources(("essays", "squad", "hotpot"), self.essays, self.squad, self.hotpot)
        assert not missing
        return found


def _sentences(rng: random.Random, count: int) -> list[str]:
    return [
        " ".join(rng.choices(_WORDS, k=rng.randint(5, 14))).capitalize() + rng.choice([".", ".", "!", '."'])
        for _ in range(count)
    ]


def make_data(folder: Path) -> Data:
    """120 sentences of essays in two files; 8 articles of 5 paragraphs; 30 questions over 10 documents each."""
    rng = random.Random(0)
    sentences = _sentences(rng, 120)
    essays = folder / "essays"
    essays.mkdir()
    (essays / "a.txt").write_text("\n\n".join(sentences[:60]) + "\n")
    (essays / "b.txt").write_text("  ".join(sentences[60:]))
    articles = []
    for article in range(8):
        paragraphs = []
        for part in range(5):
            name = f"Person{article}{part}"
            text = f"{name} lives here. " + " ".join(_sentences(rng, 3))
            answers = [{"text": name, "answer_start": 0}, {"text": f"{name} lives", "answer_start": 0}]
            questions = [
                {"question": f"Who lives in {article}{part}?", "is_impossible": False, "answers": answers},
                {"question": f"Who never lived in {article}{part}?", "is_impossible": True, "answers": []},
            ]
            paragraphs.append({"context": text, "qas": questions})
        articles.append({"title": f"Article {article}", "paragraphs": paragraphs})
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    documents = [[f"Title {i}", [text + " " for text in _sentences(rng, 2)]] for i in range(60)]
    hotpot = []
    for i in range(30):
        others = rng.sample([document for document in documents if document is not documents[i]], 9)
        hotpot.append({"question": f"Which is {i}?", "answer": f"Title {i}", "context": [*others, documents[i]]})
        hotpot[-1]["supporting_facts"] = [[f"Title {i}", 0]]
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return Data(essays, folder / "squad.json", folder / "hotpot.json")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def prompter(data: Data) -> Callable[..., Prompter]:
    """prompter(tokenizer, chat=False, flavour="nvidia"), with all data."""

    def make(tokenizer: PreTrainedTokenizerFast, chat: bool = False, flavour: str = "nvidia") -> Prompter:
        return Prompter(tokenizer, chat, FLAVOURS[flavour], data.sources)

    return make
