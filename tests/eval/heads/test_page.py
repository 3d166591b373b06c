"""What is drawn and printed of heads, from a probe of two tiny checkpoints."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from ropex.cli import app
from ropex.convert.convert import convert
from ropex.errors import OptionError, OutputError
from ropex.eval.heads.compare import compare_heads
from ropex.eval.heads.page import check_files, write_page, write_pictures
from ropex.eval.heads.plot import figures

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
LENGTHS = [128, 256]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"Line {i} of a text that goes on and on.\n" for i in range(80)))
    return str(file)


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("converted") / "x<b>y"
    convert(checkpoint, out, "adarope", init="yarn", target=2048)
    return str(out)


@pytest.fixture(scope="module")
def compared(checkpoint, converted, text) -> dict:
    return compare_heads(checkpoint, converted, [text], LENGTHS, queries=24, needles=1)


def test_every_figure_is_drawn_with_colours_in_it(compared, tmp_path):
    write_pictures(compared, tmp_path / "new" / "folder")
    drawn = sorted(path.stem.removeprefix("heads-") for path in (tmp_path / "new" / "folder").iterdir())
    assert drawn == sorted(figures(compared))
    assert {"classes", "scatter", "reach", "failure", "geometry", "pairs", "theta", "scale"} == set(drawn)
    for path in (tmp_path / "new" / "folder").iterdir():
        picture = Image.open(path).convert("RGB")
        coloured = sum(n for n, (r, g, b) in picture.getcolors(2**24) if max(r, g, b) - min(r, g, b) > 60)
        assert picture.width > 600 and (coloured > 200 or path.stem == "heads-theta"), (
            path
        )  # a fresh theta has moved nowhere


def test_the_page_stands_by_itself_and_shows_names_as_they_are(compared, tmp_path):
    page = tmp_path / "page.html"
    write_page(compared, page)
    content = page.read_text()
    assert content.count("<figure>") == len(figures(compared)) == content.count("<svg")
    assert "<script" not in content and "x&lt;b&gt;y" in content and "<b>y" not in content
    assert not re.search(r"(src|href)=\"(?!data:|#)", content.replace("xlink:href", "href"))
    assert content.count('<th scope="row">1.7</th>') == 2  # the last head of the last layer, before and after


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed (apt-get install chromium)")
def test_a_browser_lays_the_page_out_without_complaint(compared, tmp_path):
    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    write_page(compared, page)
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars",
             f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", "--window-size=1280,6000",
             page.as_uri()]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr  # nothing refused, nothing failed
    picture = Image.open(shot).convert("RGB")
    counts = {colour: count for count, colour in picture.getcolors(picture.width * picture.height)}
    assert counts.get((0, 114, 178), 0) > 500 and counts.get((213, 94, 0), 0) > 100


def test_only_a_head_that_changed_is_named_as_changed(compared, checkpoint, converted, text):
    assert [head["adarope"]["gamma"] for head in compared["after"]["heads"]] == [0.0] * 16
    assert "adarope" not in compared["before"]["heads"][0]
    same = compare_heads(checkpoint, checkpoint, [text], LENGTHS, queries=24, needles=1)
    assert same["changes"] == [] and same["before"] == same["after"]
    assert same["relations"]["256"] == {"gamma_e2": None, "tau_e2": None, "e2_change": None}


def test_heads_of_another_model_are_not_compared(checkpoint, text):
    with pytest.raises(OptionError, match="other heads"):
        compare_heads(checkpoint, "nano", [text], [128], queries=8, needles=0)


def test_names_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path):
    for wrong in ((tmp_path / "page.txt", None), (tmp_path / "no" / "page.html", None)):
        with pytest.raises(OutputError):
            check_files(*wrong)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="name a folder"):
        check_files(None, tmp_path / "file")


def inspect(*words: object) -> str:
    done = CliRunner().invoke(app, ["inspect", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_json_is_one_document_of_a_stable_shape(checkpoint, converted, text):
    words = ("--data", text, "--lengths", "128,256", "--queries", 16, "--needles", 1, "--json")
    told = json.loads(inspect(checkpoint, "--probe", *words))
    assert list(told) == [
        "kind", "checkpoint", "method", "native_window", "lengths", "queries", "windows", "positions", "distances",
        "trained_window", "thresholds", "classes", "heads",
    ]  # fmt: skip
    assert set(told["heads"][0]) == {
        "layer", "head", "kv_head", "class", "e2", "e2_error", "growth", "sink", "sink_error", "largest", "local",
        "previous", "needle", "by_position", "geometry", "pairs", "criteria",
    }  # fmt: skip
    assert list(told["heads"][0]["e2"]) == ["128", "256"]
    both = json.loads(inspect(checkpoint, "--against", converted, *words))
    assert list(both) == ["kind", "before", "after", "changes", "relations"]
    assert set(both["after"]["heads"][0]["adarope"]) == {"theta_ratio", "tau", "gamma", "lambda"}
    costs = json.loads(inspect(converted, "--revert-heads", "--data", text, "--lengths", "32", "--json"))
    assert {row["cost"] for row in costs["heads"]} == {0.0} and len(costs["heads"]) == 2 * (2 + 8)


def test_the_terminal_shows_a_map_the_classes_and_what_changed(checkpoint, converted, text, tmp_path):
    words = ("--data", text, "--lengths", "128,256", "--queries", 16, "--needles", 1)
    scores = tmp_path / "scores.json"
    shown = inspect(checkpoint, "--probe", *words, "--scores", scores, "--threshold", "local=2")
    assert re.search(r"^\s+1( +[R1LSG·]){8}\s*$", shown, re.MULTILINE) and "L local" not in shown
    assert len(json.loads(scores.read_text())) == 16
    page = tmp_path / "heads.html"
    inspect(checkpoint, "--against", converted, *words, "--known", scores, "--html", page)
    assert page.exists()


def test_known_heads_are_ringed(compared, tmp_path):
    known = copy.deepcopy(compared)
    known["after"]["known"] = [1.0] * 16
    plot = figures(compared)["classes"][1]
    for name, report in (("without", compared), ("with", known)):
        plot(report, tmp_path / f"{name}.png")

    def rings(path: Path) -> int:
        return sum(n for n, colour in Image.open(path).convert("RGB").getcolors(2**24) if colour == (240, 228, 66))

    assert rings(tmp_path / "with.png") > 16 * 20 > rings(tmp_path / "without.png")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--probe"], "--data"),
        (["--probe", "--revert-heads", "--data", "x"], "--probe"),
        (["--against", "x"], "--data"),
        (["--html", "heads.html"], "--probe"),
        (["--data", "x"], "--probe"),
        (["--revert-heads", "--data", "x", "--png", "y"], "figures"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(words, said):
    done = CliRunner().invoke(app, ["inspect", "nano", *words])
    assert done.exit_code == 2 and said in done.output


def test_the_dearest_rows_are_shown(converted, text):
    shown = inspect(converted, "--revert-heads", "--data", text, "--lengths", "32")
    assert "windows of 32 tokens" in shown and len(re.findall(r"^\s*(frequencies|scale) ", shown, re.MULTILINE)) == 15
