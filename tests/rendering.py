"""Processes that render PDF documents."""

from __future__ import annotations

import contextlib

import psutil


def rendering() -> bool:
    """Whether a child of this process renders a PDF."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "pdf_worker" in " ".join(child.cmdline()):
                return True
    return False
