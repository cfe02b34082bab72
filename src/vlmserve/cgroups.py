"""Limits of the container that this process runs in, from Linux control groups of version 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ControlGroups:
    """Where to read control groups."""

    root: Path = Path("/sys/fs/cgroup")
    """The folder where control groups are mounted."""
    process: Path = Path("/proc/self/cgroup")
    """The file that names the groups of this process."""

    def folders(self, controller: str) -> set[Path]:
        """Folders whose limits hold for this process. controller: "cpu" or "memory".

        They include the root, because the group inside a container may look like it, and all outer groups.
        """
        folders = {self.root, self.root / controller}
        for line in read(self.process).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                root = self.root if controllers == "" else self.root / controller
                group = root / path.lstrip("/")
                folders |= {folder for folder in (group, *group.parents) if folder.is_relative_to(root)}
        return folders


def read(path: Path) -> str:
    """The content of a small file without surrounding blanks; empty if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
