from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmserve.cli.help import HelpfulCommand, group
from vlmserve.cli.options import command

keys = group(help="Add, list and remove API keys.\n\nExample: vlmserve keys add alice")

KeysFile = Annotated[
    Path,
    typer.Option(
        "--api-keys-file",
        metavar="FILE",
        envvar="VLMSERVE_API_KEYS_FILE",
        help="Hashed keys; give the server the same file.",
    ),
]
Name = Annotated[str, typer.Argument(help="Name of the key's owner, for logs and limits.")]
Limit = Annotated[int | None, typer.Option(min=1, metavar="INT", help="Requests per minute (default: no limit).")]

DEFAULT_FILE = Path("api-keys.jsonl")


@keys.command("add", cls=HelpfulCommand)
@command()
def add(
    name: Name,
    api_keys_file: KeysFile = DEFAULT_FILE,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="Concurrent requests (default: no limit).")
    ] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="Prompt and answer tokens/min (default: no limit).")
    ] = None,
    cache_salt: Annotated[str | None, typer.Option(help="Keys of equal salt share caches (default: none).")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow loading and unloading adapters.")] = False,
    storage_url: Annotated[
        str | None, typer.Option(metavar="URL", envvar="VLMSERVE_STORAGE_URL", help="Server's database.")
    ] = None,
    storage_path: Annotated[
        str | None, typer.Option(metavar="FILE", envvar="VLMSERVE_STORAGE_PATH", help="Server's SQLite file.")
    ] = None,
) -> None:
    """Add a key and print it; only its hash is stored.

    Example: vlmserve keys add alice
    """
    from vlmserve.server.keys import add_key

    key = add_key(
        api_keys_file,
        name,
        max_concurrency=max_concurrency,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        cache_salt=cache_salt,
        admin=admin,
    )
    typer.echo(key)
    typer.echo(f"This is the only time that it is shown. Its hash is in {api_keys_file}.", err=True)
    _warn_of_history(name, storage_url, storage_path)


def _warn_of_history(name: str, storage_url: str | None, storage_path: str | None) -> None:
    """Warn of a history that a removed key of this name left."""
    from vlmserve.cli.messages import note
    from vlmserve.errors import ConfigurationError, StorageError
    from vlmserve.server.accounts import owner_of_key
    from vlmserve.settings.config import ServerConfig
    from vlmserve.storage.store import has_history

    config = ServerConfig.model_validate({"storage_url": storage_url, "storage_path": storage_path})
    try:
        found = has_history(config, owner_of_key(name))
    except (ConfigurationError, StorageError) as error:
        note(f"Whether an earlier key {name} has stored anything is unknown: {error}")
        return
    if found:
        note(
            f"An earlier key {name} has stored responses or files, and the new key can read them; "
            "to avoid this, choose another name"
        )


@keys.command("list", cls=HelpfulCommand)
@command()
def list_all(api_keys_file: KeysFile = DEFAULT_FILE) -> None:
    """List the names and limits of all keys.

    Example: vlmserve keys list
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from vlmserve.server.keys import read_keys

    table = Table("name", "created", "concurrency", "requests/min", "tokens/min", "cache salt", box=SIMPLE_HEAD)
    for key in read_keys(api_keys_file):
        limits = (key.max_concurrency, key.requests_per_minute, key.tokens_per_minute)
        shown = ("-" if limit is None else str(limit) for limit in limits)
        table.add_row(key.name, key.created[:10], *shown, key.cache_salt or "-")
    Console().print(table)


@keys.command("remove", cls=HelpfulCommand)
@command()
def remove(name: Name, api_keys_file: KeysFile = DEFAULT_FILE) -> None:
    """Remove a key; a running server applies it within a second.

    Example: vlmserve keys remove alice
    """
    from vlmserve.server.keys import remove_key

    remove_key(api_keys_file, name)
    typer.echo(f"Removed {name} from {api_keys_file}")
