from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ropex.errors import DataError
from ropex.text import read, read_all, sources


def texts(*paths: Path | str) -> list[str]:
    return [d.text for d in read_all(paths)]


def test_a_folder_is_opened_up_in_name_order_and_no_file_is_read_twice(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.md", "deep/c.TXT", "picture.png"):
        (tmp_path / name).write_text(name)
    found = sources([tmp_path / "b.txt", tmp_path])
    assert [Path(s).name for s in found] == ["b.txt", "a.md", "c.TXT"]


def test_each_kind_of_file_gives_its_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("whole\nfile")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    pq.write_table(pa.table({"id": [1, 2], "text": ["three", " "]}), tmp_path / "c.parquet")
    found = [[d.text for d in read(tmp_path / name)] for name in ("a.txt", "b.jsonl", "c.parquet")]
    assert found == [["whole\nfile"], ["one", "two"], ["three", " "]]
    assert texts(tmp_path) == ["whole\nfile", "one", "two", "three"]  # blank ones are no documents
    assert next(iter(read(tmp_path / "b.jsonl"))).name.endswith("b.jsonl, document 1")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "there"}\n')
    assert texts(tmp_path) == ["hello", "there"]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("owner/books", ("owner/books", "validation")),
        ("owner/books:test", ("owner/books", "test")),
        ("pg19", ("emozilla/pg19", "validation")),
        ("pg19:train", ("emozilla/pg19", "train")),
    ],
)
def test_a_hub_dataset_is_read_from_its_split(
    monkeypatch: pytest.MonkeyPatch, given: str, asked: tuple[str, str]
) -> None:
    import datasets

    def load_dataset(name: str, split: str) -> Any:
        return datasets.Dataset.from_dict({"text": [name, split]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [d.text for d in read_all([given], "validation")] == list(asked)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', "line 2"),
        ("a.jsonl", b"{broken\n", "line 1"),
        ("a.jsonl", b"\xff\n", "not UTF-8"),
        ("a.txt", b"caf\xe9", "byte 3"),
        ("a.parquet", b"PAR1 no", "not a readable Parquet"),
        ("a.csv", b"text\n", ".csv"),
        ("a.txt", b" \n", "blank"),
    ],
)
def test_unusable_text_is_an_error_that_says_where(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        texts(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["no/such/folder", "gone.txt", "./gone", "plainword"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_dataset(missing: str) -> None:
    with pytest.raises(DataError, match="does not exist"):
        sources([missing])


def test_a_table_without_text_names_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="body"):
        texts(tmp_path / "t.parquet")


def test_no_data_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data"):
        sources([])
    with pytest.raises(DataError, match="holds no"):
        sources([tmp_path])
