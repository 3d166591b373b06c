import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropex.errors import DataError
from ropex.train.documents import tokenise


@pytest.fixture
def corpus_of(byte_tokenizer: Any) -> Callable[[list[str]], Any]:
    return lambda data: tokenise(data, byte_tokenizer, 16, 257)


def test_documents_are_tokenised_apart_with_their_first_token(tmp_path: Path, corpus_of: Callable) -> None:
    texts = ["a" * 20, "b" * 30, "short"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    corpus = corpus_of([str(tmp_path / "d.jsonl")])
    assert corpus.tokens.dtype == np.uint32
    assert corpus.ends.tolist() == [21, 52]
    assert corpus.tokens[[0, 21]].tolist() == [0, 0]  # <s>
    assert (corpus.left_out, corpus.longest) == (1, 31)


def test_the_fingerprint_changes_with_a_letter_and_with_a_border(tmp_path: Path, corpus_of: Callable) -> None:
    prints = []
    for texts in (["a" * 40], ["a" * 39 + "b"], ["a" * 20, "a" * 19], ["a" * 40]):
        (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        prints.append(corpus_of([str(tmp_path / "d.jsonl")]).fingerprint)
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', "line 2"),
        ("a.txt", b"too short", "the longest has 10"),
    ],
)
def test_unusable_text_is_an_error_that_says_where(
    tmp_path: Path, corpus_of: Callable, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        corpus_of([str(tmp_path / name)])


def test_a_tokenizer_of_another_checkpoint_is_seen(tmp_path: Path, byte_tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("z" * 50)
    with pytest.raises(DataError, match="not of one checkpoint"):
        tokenise([str(tmp_path / "a.txt")], byte_tokenizer, 16, 40)


def test_tokens_are_built_once_for_a_tokenizer_and_a_content(
    tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("abc" * 40)
    said: list[str] = []

    def corpus(window: int, pack: bool = False) -> Any:
        return tokenise([str(tmp_path / "a.txt")], byte_tokenizer, window, 258, pack, said.append)

    first = corpus(16)
    assert isinstance(first.tokens, np.memmap) and not said
    again = corpus(64)  # another window takes the same tokens
    assert len(said) == 1 and again.fingerprint == first.fingerprint
    (tmp_path / "a.txt").write_text("abd" * 40)
    assert corpus(16).fingerprint != first.fingerprint and len(said) == 1
    byte_tokenizer.add_tokens(["ab"])
    corpus(16)
    assert len(said) == 1 and len(list((tmp_path / "cache" / "tokens").iterdir())) == 3


def test_short_documents_are_kept_to_be_packed(tmp_path: Path, byte_tokenizer: Any) -> None:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in (0, 1, 20, 300)))
    packed = tokenise([str(tmp_path / "d.jsonl")], byte_tokenizer, 64, 257, pack=True)
    assert (packed.documents, packed.left_out, packed.size) == (3, 1, 2 + 21 + 301)
    apart = tokenise([str(tmp_path / "d.jsonl")], byte_tokenizer, 64, 257)
    assert (apart.documents, apart.left_out, apart.size) == (1, 3, 301)
