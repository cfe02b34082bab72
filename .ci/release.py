#!/usr/bin/env python3
"""Make a release: its version, its notes and its tag.

.ci/release.py 0.2.0          # changes the files, commits, and makes the tag v0.2.0; nothing is pushed
.ci/release.py --notes 0.2.0  # prints the notes of a release: its section of CHANGELOG.md
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

CHANGELOG = Path("CHANGELOG.md")
VERSION = r"(\d+)\.(\d+)\.(\d+)"
CHANGES = Path("changes")
"""A file of one line for each change since the last release."""
FIRST_SECTION = re.compile(r"^## \[", re.MULTILINE)
PLACES = {
    Path("src/vlmserve/__init__.py"): r'(?m)^(__version__ = ")[^"]+(")$',
    Path("deploy/helm/vlmserve/Chart.yaml"): r'(?m)^(appVersion: ")[^"]+(")$',
}
"""Where the version is written, beside the changelog: what is before it and after it."""
CITATION = Path("CITATION.cff")
CITED = r"(?m)^(version: )\S+(?:\ndate-released: \S+)?()$"
"""The version in `CITATION`, with the date that every release but the first finds there."""


class ReleaseError(Exception):
    """What is missing for a release."""


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


def number(version: str) -> tuple[int, ...]:
    """Raises ReleaseError for what is no version."""
    match = re.fullmatch(VERSION, version)
    if match is None:
        raise ReleaseError(f"{version!r} is not a version like 1.2.3")
    return tuple(map(int, match.groups()))


def notes(changelog: str, title: str) -> str:
    """The section of the changelog under a title in brackets. Raises ReleaseError if it is missing or empty."""
    match = re.search(rf"^## \[{re.escape(title)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise ReleaseError(f"{CHANGELOG} says nothing under [{title}]")
    return match[1].strip() + "\n"


def fragments() -> list[Path]:
    """Files of changes. Raises ReleaseError if one has not exactly one line."""
    found = sorted(path for path in CHANGES.glob("*.md") if path.name != "README.md")
    for path in found:
        if len(path.read_text("utf-8").strip().splitlines()) != 1:
            raise ReleaseError(f"{path} must have one line")
    return found


def check(version: str) -> None:
    """Raises ReleaseError unless the tree is clean and the version is newer than the newest tag."""
    if git("status", "--porcelain"):
        raise ReleaseError("there are changes that are not committed")
    released = [number(tag[1:]) for tag in git("tag", "--list", "v*").split() if re.fullmatch("v" + VERSION, tag)]
    if released and number(version) <= max(released):
        raise ReleaseError(f"{version} is not newer than {'.'.join(map(str, max(released)))}, which is released")


def substitute(path: Path, pattern: str, value: str) -> None:
    """Raises ReleaseError unless the pattern is there exactly once."""
    text, count = re.subn(pattern, rf"\g<1>{value}\g<2>", path.read_text("utf-8"))
    if count != 1:
        raise ReleaseError(f"{path} has {count} places for {value}, not one")
    path.write_text(text, "utf-8")


def release(version: str) -> None:
    """Write the version and today's date, commit, and tag. Raises ReleaseError, before anything is changed."""
    number(version)
    check(version)
    changelog = CHANGELOG.read_text("utf-8")
    today = datetime.now(UTC).date().isoformat()
    changes = fragments()
    if f"## [{version}]\n" in changelog:
        changelog = changelog.replace(f"## [{version}]\n", f"## [{version}] - {today}\n", 1)
    elif changes:
        changelog = FIRST_SECTION.sub(f"## [{version}] - {today}\n\n## [", changelog, count=1)
    else:
        raise ReleaseError(f"{CHANGES} has no changes")
    lines = "".join(f"- {path.read_text('utf-8').strip()}\n" for path in changes)
    head = f"## [{version}] - {today}\n\n"
    changelog = changelog.replace(head, head + lines + ("\n" if lines else ""), 1)
    text = notes(changelog, version)
    for path, pattern in PLACES.items():
        substitute(path, pattern, version)
    substitute(CITATION, CITED, f"{version}\ndate-released: {today}")
    CHANGELOG.write_text(changelog, "utf-8")
    for path in changes:
        path.unlink()
    changed = [CHANGELOG, *PLACES, CITATION, *changes]
    git("commit", "--quiet", "--message", f"Release {version}", "--", *map(str, changed))
    # Titles of sections are no comments of git's.
    git("tag", "--annotate", "--cleanup=verbatim", f"v{version}", "--message", f"vlmserve {version}\n\n{text}")
    print(f"v{version} is tagged. This publishes it:\n\n    git push --atomic origin HEAD v{version}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--notes", action="store_true", help="print the notes of a release that was made")
    arguments = parser.parse_args()
    try:
        if arguments.notes:
            print(notes(CHANGELOG.read_text("utf-8"), arguments.version), end="")
        else:
            release(arguments.version)
    except ReleaseError as error:
        print(f"No release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
