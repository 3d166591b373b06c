"""The page of evaluations: what is on it, what stands side by side, and what it refuses."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropex.errors import DataError, OutputError
from ropex.eval.report import write_report
from ropex.eval.report.find import alike, find_reports, names

Contents = dict[str, Callable[[], dict[str, Any]]]
Save = Callable[..., Path]


def page_of(*folders: Path, out: Path) -> str:
    write_report(folders, out)
    return out.read_text(encoding="utf-8")


def tables(page: str) -> list[list[list[str]]]:
    """The texts of each table's cells, row by row."""
    found = []
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        rows = [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        ]
        found.append([[html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in row] for row in rows])
    return found


def test_every_number_of_every_kind_is_on_the_page(results: Path, tmp_path: Path, contents: Contents) -> None:
    cells = {cell for table in tables(page_of(results, out=tmp_path / "r.html")) for row in table for cell in row}
    for row in contents["nll"]()["results"]:
        assert {f"{b['nll']:.4f}" for b in row["buckets"]} <= cells
        assert f"{row['mean']:.4f} [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]" in cells
    for row in contents["needle"]()["results"]:
        assert {f"{100 * value:.1f}" for at in row["accuracy"] for value in at} <= cells
    for row in contents["recall"]()["results"]:
        assert f"{row['text']['nll']:.4f} [{row['text']['interval'][0]:.3f}, {row['text']['interval'][1]:.3f}]" in cells
        for groups in (row, *row["formats"].values()):
            for group in filter(None, (groups["near"], groups["far"])):
                low, high = group["logprob_interval"]
                assert f"{group['logprob']:.2f} [{low:.2f}, {high:.2f}]" in cells
                low, high = (100 * bound for bound in group["accuracy_interval"])
                assert f"{100 * group['accuracy']:.1f} [{low:.1f}, {high:.1f}]" in cells
    for row in contents["ruler"]()["results"]:
        assert f"{row['score']:.1f} [{row['interval'][0]:.0f}, {row['interval'][1]:.0f}]" in cells
    for row in contents["tasks"]()["results"]:
        assert f"{row['value']:.4f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.4f}") in cells
    for entry in contents["ruler"]()["means"]:
        assert (f"{entry['effective_length']:,}" if entry["effective_length"] else "none of these") in cells


def test_what_was_not_run_is_told_with_its_reason_once(results: Path, tmp_path: Path) -> None:
    page = page_of(results, out=tmp_path / "r.html")
    rows = [row for table in tables(page) for row in table]
    why = "no essays in the cache folder: run `ropex eval ruler --prepare` & <wait>"
    assert ["niah_single_2 at 4,096, 8,192; niah_single_3 at 4,096, 8,192", why] in rows
    assert ["piqa", "its data set cannot be reached"] in rows
    assert "<p>A &amp; B</p>" in page


def test_names_are_shown_and_never_markup(results: Path, tmp_path: Path) -> None:
    page = page_of(results, out=tmp_path / "r.html")
    assert "<img" not in page and "<b>" not in page and "<script" not in page
    assert html.escape('_<b>&"$x$"<img src=x onerror=document.title="run">', quote=False) in page.replace("&#34;", '"')


def test_the_page_points_at_nothing_outside_itself(results: Path, tmp_path: Path) -> None:
    page = page_of(results, out=tmp_path / "r.html")
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, which nothing fetches
    pointers = re.findall(r"(?:src|href)=\"([^#\"][^\"]*)\"", page)
    assert all(pointer.startswith("data:image/png;") for pointer in pointers)
    assert "@import" not in page and "default-src 'none'" in page


def test_every_entry_of_the_contents_leads_somewhere(results: Path, tmp_path: Path) -> None:
    page = page_of(results, out=tmp_path / "r.html")
    targets = re.findall(r"<a href=\"#([^\"]+)\"", page)
    assert targets == ["nll", "needle", "recall", "ruler", "tasks"]
    assert all(f'id="{target}"' in page for target in targets)


def test_runs_of_equal_settings_stand_in_one_table(tmp_path: Path, save: Save, contents: Contents) -> None:
    for kind in ("nll", "ruler", "tasks", "needle", "recall"):
        whole = contents[kind]()
        for folder, place in (("one", 0), ("two", 1)):
            checkpoint = list(dict.fromkeys(row["checkpoint"] for row in whole["results"]))[place]
            part = whole | {"results": [row for row in whole["results"] if row["checkpoint"] == checkpoint]}
            if "means" in whole:
                part["means"] = [entry for entry in whole["means"] if entry["checkpoint"] == checkpoint]
            save(tmp_path / kind / folder, part)
        save(tmp_path / kind / "other", contents[kind]() | {"settings": {"seed": 7, "border": 8192}})
        groups = list(alike(find_reports([tmp_path / kind])))
        assert [[report.folder.name for report in group] for group in groups] == [["one", "two"], ["other"]]
        apart = page_of(tmp_path / kind / "one", tmp_path / kind / "two", out=tmp_path / f"{kind}.html")
        together = page_of(save(tmp_path / f"whole-{kind}", whole), out=tmp_path / f"{kind}-whole.html")
        ours, theirs = (
            [t for t in tables(page) if not str(t[0][0]).startswith((str(tmp_path), "niah", "piqa"))]
            for page in (apart, together)
        )
        assert ours == theirs


def test_nll_on_other_texts_stands_apart(tmp_path: Path, save: Save, contents: Contents) -> None:
    other = contents["nll"]()
    for row in other["results"]:
        row["documents"] = [{"name": "b", "nll": 1.0, "tokens": row["length"]}]
    save(tmp_path / "one", contents["nll"]())
    save(tmp_path / "two", other)
    page = page_of(tmp_path, out=tmp_path / "r.html")
    assert len(re.findall(r"<h3>", page)) == 2 and "differ in their settings or inputs" in page


def test_a_checkpoint_measured_twice_is_told_apart_by_folder(tmp_path: Path, save: Save, contents: Contents) -> None:
    one, two = (save(tmp_path / name, contents["tasks"]()) for name in ("one", "two"))
    called = names(find_reports([one, two]))
    assert called[0, "/models/base", "rope"] == f"base in {one}"
    assert len(set(called.values())) == 4


def test_names_are_shortened_only_where_that_tells_them_apart(tmp_path: Path, save: Save, contents: Contents) -> None:
    whole = contents["tasks"]()
    for row, checkpoint in zip(whole["results"], ["/a/run", "/b/run/", *["/c/run"] * 8], strict=True):
        row["checkpoint"] = checkpoint
    assert set(names(find_reports([save(tmp_path / "x", whole)])).values()) == {"/a/run", "/b/run/", "/c/run"}


def test_the_difference_is_shown_where_there_is_one(tmp_path: Path, save: Save, contents: Contents) -> None:
    nll = contents["nll"]()
    found = tables(page_of(save(tmp_path / "n", nll), out=tmp_path / "1.html"))
    assert ["less the mean of base", "–", "-0.1234 [-0.200, -0.050]"] in found[0]
    nll["results"] = [row for row in nll["results"] if row["checkpoint"] == "/models/base"]
    found = tables(page_of(save(tmp_path / "n", nll), out=tmp_path / "2.html"))
    assert [row[0] for row in found[0][-2:]] == ["mean", "perplexity"]


def test_recall_is_shown_near_and_far_with_what_differs(tmp_path: Path, save: Save, contents: Contents) -> None:
    recall = contents["recall"]()
    short, _, long, _ = tables(page_of(save(tmp_path / "x", recall), out=tmp_path / "1.html"))[:4]
    assert ["NLL of the text, less that of base", "–", "-0.0123 [-0.020, 0.005]"] in short
    less = recall["results"][3]["difference"]["far"]
    low, high = less["logprob_interval"]
    assert [
        "far (96), log-probability, less that of base",
        "–",
        f"{less['logprob']:+.2f} [{low:+.2f}, {high:+.2f}]",
    ] in long
    assert not any(row[0].startswith("far") for row in short)
    recall["results"] = recall["results"][:1]
    for group in ("text", "near"):
        for name in recall["results"][0][group]:
            if name.endswith("interval"):
                recall["results"][0][group][name] = None
    (alone, *_) = tables(page_of(save(tmp_path / "x", recall), out=tmp_path / "2.html"))
    near, text = recall["results"][0]["near"], recall["results"][0]["text"]
    assert alone[1:] == [
        ["NLL of the text", f"{text['nll']:.4f}"],
        ["near (96), log-probability", f"{near['logprob']:.2f}"],
        ["near (96), right, %", f"{100 * near['accuracy']:.1f}"],
    ]


def test_an_empty_bucket_and_a_missing_cell_have_no_value(tmp_path: Path, save: Save, contents: Contents) -> None:
    nll, ruler = contents["nll"](), contents["ruler"]()
    nll["results"][0]["buckets"][2]["nll"] = None
    ruler["results"] = [row for row in ruler["results"] if (row["task"], row["length"]) != ("vt", 8192)]
    del ruler["results"][0]
    found = tables(page_of(save(tmp_path / "n", nll), save(tmp_path / "r", ruler), out=tmp_path / "r.html"))
    rows = [row for table in found for row in table]
    assert [row[1] for row in rows if row[0] == "1,024 to 1,535"] == ["–"]
    assert [row[1] for row in rows if row[0] == "niah_single_1"][0] == ""
    assert sum(row[0] == "vt" for row in rows) == 2


def test_what_is_damaged_or_not_there_is_refused_and_nothing_is_written(
    tmp_path: Path, save: Save, contents: Contents
) -> None:
    out = tmp_path / "r.html"

    def refused(*folders: Path) -> str:
        with pytest.raises(DataError) as caught:
            write_report(folders, out)
        assert not out.exists() and "\n" not in str(caught.value)
        return str(caught.value)

    assert "is no folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no report.json" in refused(tmp_path / "empty")
    cut = save(tmp_path / "cut", {})
    (cut / "report.json").write_text('{"kind": "nll", "results": [')
    assert "not readable JSON" in refused(cut)
    for content in ([1], {}, {"kind": "demo", "results": []}):
        assert "no report of `ropex eval`" in refused(save(tmp_path / "alien", content))
    assert "no list of results" in refused(save(tmp_path / "flat", {"kind": "ruler", "results": "none"}))
    lacking = contents["ruler"]()
    del lacking["results"][3]["score"]
    assert "lacks 'score'" in refused(save(tmp_path / "lacking", lacking))
    wrong = contents["nll"]()
    wrong["results"][0]["buckets"] = [{"start": "a"}]
    assert "values that do not fit" in refused(save(tmp_path / "wrong", wrong))


def test_a_page_that_exists_is_replaced_only_when_asked(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    out.write_text("mine")
    with pytest.raises(OutputError, match="--overwrite"):
        write_report([results], out)
    assert out.read_text() == "mine"
    write_report([results], out, overwrite=True)
    assert out.read_text().startswith("<!DOCTYPE html>")
    for wrong, said in ((tmp_path / "no" / "r.html", "does not exist"), (tmp_path / "r.txt", "end it in .html")):
        with pytest.raises(OutputError, match=said):
            write_report([results], wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "results"]


def test_the_answer_names_what_was_found_each_once(results: Path, tmp_path: Path) -> None:
    found = write_report([results, results / "nll"], tmp_path / "r.html")
    assert [report["kind"] for report in found["reports"]] == ["needle", "nll", "recall", "ruler", "tasks"]
    assert json.loads(json.dumps(found)) == found
