"""A page in a real browser: what it measures, fetches and says there."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking --no-first-run "
    "--enable-logging=stderr --virtual-time-budget=3000 --dump-dom"
)
PROBE = """
<iframe id='page' style='border:0;width:{width}px;height:900px' srcdoc="{page}"></iframe>
<script>onload = () => {{
  const view = document.getElementById('page').contentWindow, root = view.document.documentElement;
  const boxes = [...view.document.querySelectorAll('img')].map(img => [img.naturalWidth, img.clientWidth]);
  const found = {{inner: view.innerWidth, client: root.clientWidth, scroll: root.scrollWidth, boxes,
    sections: view.document.querySelectorAll('section h2').length,
    colour: view.getComputedStyle(view.document.body).color,
    back: view.getComputedStyle(view.document.body).backgroundColor,
    fetched: view.performance.getEntriesByType('resource').map(entry => entry.name)}};
  const out = document.createElement('pre'); out.id = 'found'; out.textContent = JSON.stringify(found);
  document.body.append(out) }}</script>
"""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


def look(page: str, width: int, folder: Path) -> tuple[dict, list[str]]:
    """What a browser makes of `page` at `width` pixels, and what its console says."""
    probe = folder / f"probe_{width}.html"
    probe.write_text(
        "<!doctype html><meta charset='utf-8'>" + PROBE.format(width=width, page=html.escape(page))
    )
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"]
    done = subprocess.run([*command, probe.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<pre id=\"found\">(.*?)</pre>", done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]


def check(page: str, width: int, folder: Path) -> dict:
    """Assert that `page` fits `width` pixels, shows its pictures, fetches nothing and has no error."""
    found, console = look(page, width, folder)
    assert found["inner"] == width
    assert found["scroll"] <= found["client"], "the page scrolls sideways"
    assert found["fetched"] == []
    assert console == []
    assert len(found["boxes"]) == page.count("<img")
    assert all(natural > 0 and 0 < shown <= width for natural, shown in found["boxes"])
    assert (found["colour"], found["back"]) == ("rgb(26, 26, 26)", "rgb(255, 255, 255)")
    return found
