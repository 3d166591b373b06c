"""The page in a real browser: headless Chromium lays it out, and says what it made of it."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ropex.eval.report import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed (apt-get install chromium)"
)

MEASURE = """<script>
const box = (e) => e.getBoundingClientRect();
const style = (e) => getComputedStyle(e);
const all = (what) => [...document.querySelectorAll(what)];
document.body.dataset.measured = JSON.stringify({
  title: document.title,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  headings: all("h2").map((e) => e.textContent),
  figures: all("figure svg").map((e) => [box(e).width, box(e).height]),
  figuresOut: all("figure svg").filter((e) => box(e).right > document.documentElement.clientWidth + 1).length,
  numbersNotRight: all("table:not(.words) td").filter((e) => style(e).textAlign != "right").length,
  numbers: all("table:not(.words) td").length,
  strangers: all("main img, main b, main script, iframe, link").length,
  fetched: performance.getEntriesByType("resource").length,
  names: all("figcaption, th").map((e) => e.textContent),
  legends: all("svg text").map((e) => e.textContent),
});
</script>"""


def browse(page: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open the page headless, in a profile of its own."""
    assert BROWSER is not None
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
             f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]  # fmt: skip
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def measured(page: Path, folder: Path, width: int) -> dict[str, Any]:
    """What the browser made of a copy of the page that may run the script above."""
    text = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page.read_text(encoding="utf-8"))
    copy = folder / "copy.html"
    copy.write_text(text.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    shown = browse(copy, folder, "--dump-dom", f"--window-size={width},900").stdout
    found = re.search(r'data-measured="([^"]*)"', shown)
    assert found, shown[-2000:]
    return json.loads(found[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture
def page(results: Path, tmp_path: Path) -> Path:
    out = tmp_path / "report.html"
    write_report([results], out)
    return out


@pytest.mark.parametrize("width", [1280, 500])
def test_it_is_laid_out_whole_with_every_figure_and_no_stranger(page: Path, tmp_path: Path, width: int) -> None:
    seen = measured(page, tmp_path, width)
    assert seen["title"] == "ropex report"  # a name that is a script has not run
    assert seen["headings"] == ["NLL by position", "Needle in a haystack", "Recall", "RULER", "Tasks"]
    assert len(seen["figures"]) == 2 + 2 + 2 + 2 + 1
    assert all(width > 150 and height > 80 for width, height in seen["figures"])
    assert seen["overflow"] <= 0 and seen["figuresOut"] == 0
    assert seen["numbers"] > 200 and seen["numbersNotRight"] == 0
    assert seen["strangers"] == seen["fetched"] == 0
    nasty = '_<b>&"$x$"<img src=x onerror=document.title="run"> (adarope)'
    assert nasty in seen["names"]
    assert any(nasty in text for text in seen["legends"])


@pytest.mark.parametrize(("scheme", "paper"), [("1", (255, 255, 255)), ("0", (21, 24, 28))], ids=["light", "dark"])
def test_it_is_drawn_in_light_and_dark(page: Path, tmp_path: Path, scheme: str, paper: tuple[int, int, int]) -> None:
    shot = tmp_path / "shot.png"
    told = browse(
        page,
        tmp_path,
        f"--screenshot={shot}",
        "--window-size=1280,5000",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    assert "CONSOLE" not in told.stderr  # nothing refused, nothing failed
    picture = Image.open(shot).convert("RGB")
    counts = {colour: count for count, colour in picture.getcolors(picture.width * picture.height) or []}
    assert max(counts, key=lambda colour: counts[colour]) == paper
    blue, orange = (0, 114, 178), (213, 94, 0)
    assert counts.get(blue, 0) > 500 and counts.get(orange, 0) > 500
    ink = [colour for colour in counts if abs(sum(colour) - sum(paper)) > 500]
    assert sum(counts[colour] for colour in ink) > 10_000  # text stands out from the paper


def test_it_prints(page: Path, tmp_path: Path) -> None:
    pdf = tmp_path / "report.pdf"
    browse(page, tmp_path, f"--print-to-pdf={pdf}", "--no-pdf-header-footer", "--blink-settings=preferredColorScheme=0")
    content = pdf.read_bytes()
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    assert content.startswith(b"%PDF") and 3 <= pages <= 20
