"""A browser without a window, for pages that ddpkit writes: what a page is like there, at some
width.

Where there is none its tests skip; with DDPKIT_REQUIRE_CLUSTERS=1 they fail, and as root on Debian
``python -m tests.clusters`` installs one.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

#: Name of a program: the Debian package that brings it. fontconfig brings the font that pages are
#: drawn with.
PROGRAMS = {"chromium-headless-shell": "chromium-headless-shell", "fc-match": "fontconfig"}
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
REQUIRE = "DDPKIT_REQUIRE_CLUSTERS"
HEIGHT = 2400
SECONDS = 120

# Goes before all else in a copy of the page: notes what fails.
WATCH = """<script>
window.failures = [];
addEventListener("error", (event) => window.failures.push(String(event.message || event.target.outerHTML)), true);
addEventListener("unhandledrejection", (event) => window.failures.push(String(event.reason)));
console.error = (...words) => window.failures.push(words.join(" "));
</script>"""  # noqa: E501

# Goes after all else: uses everything that can be used, and writes down what was seen.
USE = """<script>
addEventListener("load", () => {
  const seen = { tips: 0, failures: window.failures };
  const root = document.documentElement;
  const measure = () => {
    seen.width = root.clientWidth;
    seen.overflow = root.scrollWidth - root.clientWidth;
    seen.wide = [...document.querySelectorAll("body *")]
      .filter((one) => one.getBoundingClientRect().right > root.clientWidth + 1 && !one.closest(".scroll, pre, svg"))
      .map((one) => one.outerHTML.slice(0, 120));
  };
  measure();
  for (const one of document.querySelectorAll("details")) one.open = true;
  for (const plot of document.querySelectorAll(".plot")) {
    const box = plot.getBoundingClientRect();
    const at = { clientX: box.left + 0.6 * box.width, clientY: box.top + 20, bubbles: true };
    plot.dispatchEvent(new PointerEvent("pointermove", at));
    const tip = plot.querySelector(".tip");
    if (tip && !tip.hidden && /\\d/.test(tip.textContent)) seen.tips += 1;
  }
  seen.plots = document.querySelectorAll(".plot").length;
  const curves = () => [...document.querySelectorAll(".key[data-line]")]
    .filter((key) => document.getElementById(key.dataset.line).style.display !== "none").length;
  seen.curves = curves();
  for (const key of document.querySelectorAll(".key[data-line]")) key.click();
  seen.curvesLeft = curves();
  for (const key of document.querySelectorAll(".key[data-line]")) key.click();
  document.querySelector(".theme").click();
  seen.theme = root.dataset.theme;
  measure();
  seen.loaded = performance.getEntriesByType("resource").length;
  root.dataset.seen = JSON.stringify(seen);
});
</script>"""  # noqa: E501


@dataclass
class Seen:
    """What a page is like in a browser.

    Attributes:
        failures: errors of scripts, and what could not be loaded.
        width: of the window, in CSS pixels.
        overflow: pixels by which the page is wider.
        wide: what of it is.
        loaded: files that were asked for besides the page.
        plots: how many there are; ``tips``: of them with a tooltip.
        curves: how many are shown; ``curves_left``: after a click on every name in a legend.
        theme: after a click on the button.
    """

    failures: list[str]
    width: int
    overflow: int
    wide: list[str]
    loaded: int
    plots: int
    tips: int
    curves: int
    curves_left: int
    theme: str | None = None
    dom: str = field(repr=False, default="")


class Browser:
    """A browser that is started anew for each page."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program = program
        self.folder = folder

    def look(self, page: Path, width: int) -> Seen:
        """Open a page, use all of it, and say what was seen."""
        text = page.read_text(encoding="utf-8")
        copy = self.folder / f"watched-{width}-{page.name}"
        text = text.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{USE}</body>", 1)
        copy.write_text(text, encoding="utf-8")
        dom = self._run(copy, width, "--dump-dom").decode()
        found = re.search(r'data-seen="([^"]*)"', dom)
        assert found, f"the page's scripts have not come to their end:\n{dom[:3000]}"
        seen = json.loads(html.unescape(found[1]))
        seen["curves_left"] = seen.pop("curvesLeft")
        return Seen(dom=dom, **seen)

    def photograph(self, page: Path, width: int, theme: str = "light") -> Path:
        """Take a picture of a page; return its file."""
        copy = self.folder / f"{theme}-{page.name}"
        text = page.read_text(encoding="utf-8")
        copy.write_text(text.replace("<html ", f'<html data-theme="{theme}" ', 1), encoding="utf-8")
        picture = self.folder / f"{page.stem}-{width}-{theme}.png"
        self._run(copy, width, f"--screenshot={picture}")
        return picture

    def _run(self, page: Path, width: int, *options: str) -> bytes:
        profile = self.folder / "profile"
        command = [
            self.program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",  # they take 15 pixels of the width
            f"--user-data-dir={profile}",
            f"--window-size={width},{HEIGHT}",
            *options,
            page.as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
        finally:
            shutil.rmtree(profile, ignore_errors=True)
        return done.stdout


def find_browser(folder: Path) -> Browser:
    """Return a browser; skip the test where there is none, or fail where there has to be one."""
    import pytest  # `python -m tests.clusters` does without

    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = f"none of {', '.join(NAMES)} is installed"
        if os.environ.get(REQUIRE, "") not in {"", "0"}:
            pytest.fail(f"{reason}\n({REQUIRE} is set: a failure and no skip.)", pytrace=False)
        pytest.skip(reason)
    return Browser(found, folder)
