"""A real browser for tests of pages: Chromium, without a window and without the network.

Tests that need one have the mark `needs_browser` and are skipped where none is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from .patience import PATIENCE_S

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), "")
needs_browser = pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(NAMES)} is installed")

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
    *("--dump-dom", "--enable-logging=stderr", "--v=0"),
)

#: Returns the boxes of one document that are not as they should be.
_LOOK = """
const look = (page) => {
  const width = page.documentElement.clientWidth;
  const told = (one) => one.textContent.trim().slice(0, 60) || one.tagName;
  const boxOf = (one) => {
    if (one.closest('svg')) return one.getBoundingClientRect();
    const range = page.createRange();
    range.selectNodeContents(one);
    return range.getBoundingClientRect();
  };
  const texts = [...page.querySelectorAll('h1, h2, h3, p, li, th, td, svg text')].filter(told);
  const boxes = texts.map((one) => [one, boxOf(one)]).filter(([, box]) => box.width > 0);
  for (const one of page.querySelectorAll('svg.plot, table')) boxes.push([one, one.getBoundingClientRect()]);
  const cut = boxes.filter(([one, box]) => {
    const outer = one.closest('.scroll')?.getBoundingClientRect() ?? {left: 0, right: width};
    return box.left < outer.left - 1 || box.right > outer.right + 1 || box.left < -1 || box.right > width + 1;
  }).map(([one]) => told(one));
  for (const one of texts)
    if (!one.closest('svg') &&
        (one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1))
      cut.push(told(one));
  const overlapping = [];
  for (const [at, [one, box]] of boxes.entries())
    for (const [other, another] of boxes.slice(at + 1)) {
      if (one.contains(other) || other.contains(one)) continue;
      const across = Math.min(box.right, another.right) - Math.max(box.left, another.left);
      const down = Math.min(box.bottom, another.bottom) - Math.max(box.top, another.top);
      if (across > 1 && down > 1) overlapping.push([told(one), told(other)]);
    }
  const size = (one) => {
    const stretched = one.closest('svg') ? one.getScreenCTM().a : 1;
    return parseFloat(page.defaultView.getComputedStyle(one).fontSize) * stretched;
  };
  return {
    cut, overlapping,
    sideways: page.documentElement.scrollWidth - width,
    smallest: Math.min(...boxes.filter(([one]) => texts.includes(one)).map(([one]) => size(one))),
    columns: Object.fromEntries([...page.querySelectorAll('th')].map(
      (one) => [one.textContent, one.getBoundingClientRect().right <= width])),
  };
};
"""


def probe(text: str, script: str, directory: Path) -> tuple[Any, list[str]]:
    """Return what a script finds in a page, once all is loaded, and what the page wrote to its console.

    Parameters
    ----------
    text
        The page.
    script
        JavaScript: the body of a function that returns a value that JSON can express.
    directory
        An empty directory for the page and the browser's files.
    """
    left = f"""<script>addEventListener('load', () => {{
      const note = document.createElement('pre');
      note.id = 'found';
      note.textContent = JSON.stringify((() => {{ {script} }})());
      document.body.append(note);
    }});</script>"""
    path = directory / "page.html"
    path.write_text(text.replace("</body>", f"{left}</body>"), encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            *_FLAGS,
            "--window-size=1280,2000",
            f"--user-data-dir={directory / 'files'}",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(match[1])), console


def layouts(
    pages: Mapping[str, str], widths: Sequence[int], directory: Path
) -> tuple[dict[tuple[str, int], dict[str, Any]], list[str]]:
    """Return how each page is laid out in windows of each width, and what they wrote to the console.

    Of each layout: ``cut``, the texts that leave the window or their scrolling box; ``overlapping``, pairs of
    texts and pictures; ``sideways``, by how many pixels the page is wider than the window; ``smallest``, the
    size of the smallest letters in pixels; ``columns``, True for a column's header that the window shows.
    """
    windows = [(name, width) for name in pages for width in widths]
    frames = "".join(
        f'<iframe width="{width}" height="8000" style="border:0" srcdoc="{escape(pages[name])}"></iframe>'
        for name, width in windows
    )
    script = (
        f"{_LOOK} return [...document.querySelectorAll('iframe')].map((one) => look(one.contentDocument));"
    )
    document = f"<!doctype html><html><body>{frames}</body></html>"
    found, console = probe(document, script, directory)
    return dict(zip(windows, found, strict=True)), console
