"""Hooks of mkdocs: the README is the first page, and links that lead out of docs/ lead to the repository.

`VLMSERVE_REPOSITORY` is where that shows its files, like https://github.com/OWNER/NAME/blob/main; without it such links
become plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
FIRST = "index.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
SOURCE = re.compile(r'\b(src|srcset)="([^"]+)"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and images of the examples, which pages show."""
    files.append(File.generated(config, FIRST, content=(ROOT / "README.md").read_text("utf-8")))
    for image in sorted((ROOT / "examples").glob("*.png")):
        files.append(File.generated(config, f"examples/{image.name}", abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead where they lead in the repository. Blocks of code stay as they are."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _relink(part, page.file.src_uri) for part in parts)


def _relink(text: str, uri: str) -> str:
    folder = "" if uri == FIRST else posixpath.join("docs", posixpath.dirname(uri))

    def target(path: str) -> str | None:
        """What a page at `uri` has to write for a path; None for what is not among the pages."""
        whole = posixpath.normpath(posixpath.join(folder, path))
        if whole.startswith("docs/"):
            return posixpath.relpath(whole.removeprefix("docs/"), posixpath.dirname(uri) or ".")
        if whole.startswith("examples/") and whole.endswith(".png"):
            return posixpath.relpath(whole, posixpath.dirname(uri) or ".")
        return None

    def link(match: re.Match[str]) -> str:
        image, label, path, anchor = match[1], match[2], match[3], match[4] or ""
        if ":" in path:
            return match[0]
        if (found := target(path)) is not None:
            return f"{image}[{label}]({found}{anchor})"
        repository = os.environ.get("VLMSERVE_REPOSITORY")
        whole = posixpath.normpath(posixpath.join(folder, path))
        return f"[{label}]({repository}/{whole}{anchor})" if repository else label

    def source(match: re.Match[str]) -> str:
        found = None if ":" in match[2] else target(match[2])
        return match[0] if found is None else f'{match[1]}="{found}"'

    return SOURCE.sub(source, LINK.sub(link, text))
