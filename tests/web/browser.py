"""The system's own Chromium, driven by Playwright, which downloads nothing."""

from __future__ import annotations

import shutil

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium() -> str | None:
    """Where it is, under the names that systems give it; None if there is none.

    The shell has no windows and no start page, which take a third of the browser's processor time.
    """
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path is not None), None)
