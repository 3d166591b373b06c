"""Ids put together from pieces are those of the text, however it is cut."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropex.eval.models import encode
from ropex.eval.ruler.blocks import Blocks
from ropex.eval.ruler.wording import load_wording

from ..conftest import make_tokenizer

KINDS = [{}, {"bos": True}, {"metaspace": True}, {"uncut": True}, {"llama3": True}, {"size": 300}]
LINES = load_wording().niah_noise.split(". ")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(
    pieces=st.lists(
        st.text("ab ThVAR12.\n'=", min_size=1, max_size=6)
        | st.sampled_from(LINES)
        | st.sampled_from([" ", "\n", ". "]),
        min_size=2,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_pieces_give_the_ids_of_their_text(kind: dict, pieces: list[str]) -> None:
    """The second time around, the neighbours are known."""
    tokenizer = make_tokenizer(**kind)
    blocks = Blocks(tokenizer)
    text = pieces * 30
    for _ in range(3):
        assert blocks.join([text, pieces]) == [encode(tokenizer, "".join(text)), encode(tokenizer, "".join(pieces))]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_lines_come_apart(kind: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the path above is taken at all."""
    tokenizer = make_tokenizer(**kind)
    blocks = Blocks(tokenizer)
    lines = [line + "\n" for line in LINES]
    rng = random.Random(0)
    blocks.join([rng.choices(lines, k=50) for _ in range(10)])
    seen: list[str] = []
    plain = blocks.encode
    monkeypatch.setattr(blocks, "encode", lambda texts: seen.extend(texts) or plain(texts))
    for _ in range(20):
        text = rng.choices(lines, k=50)
        assert blocks.join([text]) == [encode(tokenizer, "".join(text))]
    assert max(map(len, seen)) < 200
    assert len(seen) < 70
