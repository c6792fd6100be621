"""A real browser without a window, with a profile of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Literal

Scheme = Literal["dark", "light"]
PREFERRED = {"dark": "0", "light": "1"}  # blink::mojom::PreferredColorScheme
PROGRAM = shutil.which("chromium")


def dom(page: Path, profile: Path) -> str:
    """The page as the browser understood it."""
    return _chromium(profile, "light", "--dump-dom", page.as_uri())


def screenshot(page: Path, profile: Path, scheme: Scheme, target: Path, height: int = 4800) -> None:
    """A picture of the page, 1,280 pixels wide."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    _chromium(profile, scheme, f"--window-size=1280,{height}", f"--screenshot={target}", page.as_uri())
    assert target.exists()


def _chromium(profile: Path, scheme: Scheme, *more: str) -> str:
    assert PROGRAM is not None
    done = subprocess.run(
        # Root may not use the sandbox; what is opened is a page of ours. No network: it needs none.
        [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--no-first-run", "--proxy-server=127.0.0.1:9", f"--user-data-dir={profile}",
         f"--blink-settings=preferredColorScheme={PREFERRED[scheme]}", *more],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
