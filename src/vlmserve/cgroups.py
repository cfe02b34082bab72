"""Resource limits of this process's container, from Linux control groups (versions 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ControlGroups:
    root: Path = Path("/sys/fs/cgroup")
    """The mount point of control groups."""
    process: Path = Path("/proc/self/cgroup")
    """The file that names this process's groups."""

    def folders(self, controller: str) -> set[Path]:
        """Folders with limits of this process, up to the root: a container may show its group as the root."""
        folders = {self.root, self.root / controller}
        for line in read(self.process).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                root = self.root if controllers == "" else self.root / controller
                group = root / path.lstrip("/")
                folders |= {folder for folder in (group, *group.parents) if folder.is_relative_to(root)}
        return folders


def read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
