"""A command that takes all settings of a server and keeps what it was given."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated

import typer
from typer.testing import CliRunner

from vlmserve.cli.options import command
from vlmserve.cli.sources import Origins
from vlmserve.cli.spellings import SettingsCommand
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

CLEAN = {"VLMSERVE_KERNELS": None, "COLUMNS": "200", "TERM": "dumb"}


@dataclass
class Given:
    """What the command was given, or how it ended."""

    exit_code: int = 0
    stderr: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> object:
        for config in self.__dict__["settings"].values():
            if name in type(config).model_fields:
                return getattr(config, name)
        raise AttributeError(f"{name}: {self.stderr}")


GIVEN: list[Given] = []
"""What the command was given each time; it is made once, which takes longer than to run it."""


@functools.cache
def probe() -> typer.Typer:
    """The command."""
    app = typer.Typer()

    @app.command(cls=SettingsCommand)
    @command()
    def serve(
        engine: EngineConfig,
        media: MediaConfig,
        server: ServerConfig,
        origins: Origins,
        model: Annotated[str, typer.Argument()] = "pixie",
    ) -> None:
        settings = {"engine": engine, "media": media, "server": server}
        GIVEN.append(Given(settings=settings, origins={name: origin.name for name, origin in origins.items()}))

    return app


def give(*arguments: object, **environment: str | None) -> Given:
    """Run the command with words on its line and variables in its environment."""
    GIVEN.clear()
    words = [str(one) for one in arguments]
    result = CliRunner(env=CLEAN | environment).invoke(probe(), words, catch_exceptions=False)
    given = GIVEN.pop() if GIVEN else Given()
    given.exit_code, given.stderr = result.exit_code, result.stderr
    return given
