"""A page as headless Chromium shows it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def check_in_a_browser(page: str, width: int, panels: int, folder: Path) -> None:
    """No console message, so many panels all of them drawn, nothing wider than the screen."""
    (folder / "frame.html").write_text(
        f"""<!doctype html><meta charset="utf-8"><iframe id="page" style="width: {width}px; height: 900px"></iframe>
        <script>
        const frame = document.getElementById("page");
        frame.onload = () => {{
          const d = frame.contentDocument, all = [...d.querySelectorAll("svg")].map(e => e.getBoundingClientRect());
          document.body.dataset.seen = [d.documentElement.scrollWidth, all.length,
            all.filter(r => r.width > 40 && r.height > 40).length, getComputedStyle(d.body).fontSize].join(" ");
        }};
        frame.srcdoc = {json.dumps(page).replace("</", "<" + chr(92) + "/")};
        </script>""",
        encoding="utf-8",
    )
    quiet = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    shown = ["--window-size=1400,1000", "--dump-dom", (folder / "frame.html").as_uri()]
    profile = ["--disable-sync", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"]
    command = [str(CHROMIUM), "--headless", "--no-sandbox", *quiet, *profile, *shown]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    seen = re.search(r'data-seen="(\d+) (\d+) (\d+) (\S+)"', done.stdout)
    assert seen is not None
    assert int(seen[1]) <= width
    assert int(seen[2]) == int(seen[3]) == panels
    assert seen[4] == "16px"
