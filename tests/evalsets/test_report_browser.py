"""The report in a real browser: nothing on the console, every figure drawn, in light, dark and print."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qtool.evalsets.compare import Comparison, compare
from qtool.evalsets.report import html

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH = 1100

# Appended to a copy of the report: boxes of every figure and what went wrong, as attributes of <html>.
PROBE = """<script>
const boxes = [...document.querySelectorAll("figure > svg")].map(svg => {
  const point = s => s.tagName === "line" && ["x", "y"].every(n => s.getAttribute(n + 1) === s.getAttribute(n + 2));
  const shapes = [...svg.querySelectorAll("rect,line,path,circle,text")].filter(s => !point(s));
  const seen = shapes.filter(s => { const b = s.getBoundingClientRect(); return b.width + b.height > 0; });
  const box = svg.getBoundingClientRect();
  const colour = getComputedStyle(svg.querySelector("text")).fill;
  return [box.width, box.height, shapes.length, seen.length, colour].join(" ");
});
document.documentElement.dataset.figures = boxes.join(";");
document.documentElement.dataset.overflow = document.documentElement.scrollWidth - window.innerWidth;
document.documentElement.dataset.page = getComputedStyle(document.body).backgroundColor;
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser on this machine ({', '.join(NAMES)}): install chromium to look at the report in it")
    return found


@pytest.fixture(scope="module")
def page(tiny: Path, tiny_noisy: Path, tmp_path_factory: pytest.TempPathFactory, fake_served: Any) -> Path:
    task = tmp_path_factory.mktemp("task") / "short.jsonl"
    task.write_text("\n".join(f'{{"context": "i {n}", "choices": ["xxxxxxxxx", "y"], "answer": 1}}' for n in range(30)))
    found: Comparison = compare(tiny, tiny_noisy, windows=2, context=64, generations=2, tasks=[task], serve=fake_served)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html([found], ["qtool", "compare"]), encoding="utf-8")
    return path


def _run(browser: str, folder: Path, url: Path, *options: str) -> tuple[str, str]:
    """Standard output and what the browser logged of the page's console."""
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},2400",
        "--enable-logging=stderr", "--v=0", *options, url.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def _figures(browser: str, tmp_path: Path, page: Path, *options: str) -> tuple[list[list[str]], dict[str, str]]:
    probed = tmp_path / "probed.html"
    text = page.read_text(encoding="utf-8")
    probed.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    dom, console = _run(browser, tmp_path, probed, "--dump-dom", *options)
    assert console == ""
    data = dict(re.findall(r'data-(\w+)="([^"]*)"', dom.split("<head>")[0]))
    return [figure.split(" ", 4) for figure in data["figures"].split(";")], data


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn(browser: str, page: Path, tmp_path: Path, scheme: str) -> None:
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    figures, data = _figures(browser, tmp_path, page, *dark)
    assert len(figures) == page.read_text(encoding="utf-8").count("<figure>") >= 5
    for width, height, shapes, seen, colour in figures:
        assert float(width) > 100
        assert float(height) > 60
        assert int(seen) == int(shapes) > 3
        red = int(re.findall(r"\d+", colour)[0])
        assert (red > 128) == (scheme == "dark"), colour  # text stands out from the page
    assert float(data["overflow"]) <= 0  # nothing is wider than the page
    assert (int(re.findall(r"\d+", data["page"])[0]) < 128) == (scheme == "dark")


@pytest.mark.slow
def test_the_screenshot_shows_the_report(browser: str, page: Path, tmp_path: Path) -> None:
    """The verdict's red, the figures' blue and the soft green of what is allowed are all there, on a light page."""
    shot = tmp_path / "shot.png"
    _, console = _run(browser, tmp_path, page, f"--screenshot={shot}")
    assert console == ""
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape[1] == WIDTH

    def share(red: int, green: int, blue: int) -> float:
        return float((np.abs(pixels - [red, green, blue]).max(axis=2) <= 6).mean())

    assert share(0xFF, 0xFF, 0xFF) > 0.4  # cards
    assert share(0xC2, 0x30, 0x3B) > 1e-4  # FAIL
    assert share(0xE5, 0xF4, 0xEC) > 1e-3  # the band of what is allowed
    assert share(0x2F, 0x5F, 0xD0) > 1e-3  # the histogram


@pytest.mark.slow
def test_it_prints(browser: str, page: Path, tmp_path: Path) -> None:
    printed = tmp_path / "report.pdf"
    _, console = _run(browser, tmp_path, page, f"--print-to-pdf={printed}", "--no-pdf-header-footer")
    assert console == ""
    raw = printed.read_bytes()
    assert raw.startswith(b"%PDF-")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", raw)) <= 12
