from pathlib import Path

import pytest

from ropex.errors import DataError
from ropex.eval.text import read_documents


def test_folders_are_read_in_name_order_and_no_file_twice(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in {"b.md": "two", "a.txt": "one", "sub/c.TXT": "three", "d.json": "{}"}.items():
        (tmp_path / name).write_text(text)
    documents = read_documents([tmp_path, tmp_path / "a.txt"])
    assert [d.text for d in documents] == ["one", "two", "three"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read_documents([tmp_path])[0].text == "hello"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "does not exist"),
        ("table.csv", b"a,b", "neither .txt nor .md"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "byte 3"),
        ("blank.txt", b" \n", "no text"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_documents([tmp_path / name])
    assert "\n" not in str(caught.value)


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no .txt or .md"):
        read_documents([tmp_path])
