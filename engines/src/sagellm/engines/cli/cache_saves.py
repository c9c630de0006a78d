"""`cache save|load|saves|delete`: the prefix cache of a running engine, to a file and back."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.names import complete_save
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.cli.running import EngineName, connect
from sagellm.engines.cli.stats import cache as app
from sagellm.engines.cli.targets import confirm_overwriting
from sagellm.engines.progress import progress_bar
from sagellm.engines.serving import AdminClient
from sagellm.engines.sizes import format_bytes

_POLL_S = 0.05

SaveName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the save; never a path.")]
ExistingName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the save; never a path.", autocompletion=complete_save),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def save(
    name: SaveName,
    *,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Save what is this tenant's. [default: all]")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", "--force", "--yes", "-y", help="Overwrite the save if it exists, without asking."
        ),
    ] = False,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Save the KV of all that is cached, in the folder `kv.save_folder`, while requests run.

    A save that is overwritten stays as it is until the new one is whole.
    """
    _, client = connect(engine)
    with client:
        if not overwrite and name in _sizes(client):
            confirm_overwriting(f"the save {name}", kind="save")
        done = _follow(client, "cache_save", f"saving {name}", as_json, name=name, tenant=tenant)
    _report(done, as_json, "saved", "left out: evicted before their turn")


@app.command()
def load(
    name: ExistingName,
    *,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Refuse a save that has more than this tenant's.")
    ] = None,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Cache what was saved, each tenant's as its own, in blocks that are free, while requests run.

    A save of another model, dtype or layout of KV is refused.
    """
    _, client = connect(engine)
    with client:
        done = _follow(client, "cache_load", f"loading {name}", as_json, name=name, tenant=tenant)
    _report(
        done,
        as_json,
        "cached",
        "left out: no block was free (`sage llm cache evict N` makes room), or what comes before is damaged",
    )


@app.command()
def saves(*, engine: EngineName = None, as_json: AsJson = False) -> None:
    """List what is saved."""
    _, client = connect(engine)
    with client:
        found = client.call("cache_saves")
    if as_json:
        print_json(found)
        return
    rows = [(each["name"], format_bytes(each["num_bytes"])) for each in found]
    typer.echo(columns(("NAME", "SIZE"), rows) if rows else "nothing is saved")


@app.command()
def delete(
    name: ExistingName,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete it without asking.")] = False,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Delete a save from the folder `kv.save_folder`; the prefix cache is left as it is."""
    _, client = connect(engine)
    with client:
        if not yes:
            _confirm(name, sizes=_sizes(client))
        done = client.call("cache_delete", name=name)
    if as_json:
        print_json(done)
        return
    typer.echo(f"deleted {name}, {format_bytes(done['num_bytes'])}")


def _sizes(client: AdminClient) -> dict[str, int]:
    """Return the bytes of each save by its name."""
    return {each["name"]: each["num_bytes"] for each in client.call("cache_saves")}


def _confirm(name: str, *, sizes: dict[str, int]) -> None:
    """Ask on a terminal; elsewhere require --yes. The engine itself refuses a name that does not exist."""
    if name not in sizes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"the save {name} would be deleted for good; confirm it with --yes")
    typer.confirm(f"delete the save {name} ({format_bytes(sizes[name])}) for good?", abort=True, err=True)


def _follow(client: AdminClient, operation: str, label: str, as_json: bool, **arguments: Any) -> Any:  # noqa: FBT001
    """Run an operation of the engine part by part, with a progress bar of completed blocks."""
    progress = client.call(operation, **arguments)
    while progress["num_blocks"] == 0 and progress["phase"] != "done":
        progress = _go_on(client, progress)
    total = progress["num_blocks"]
    with progress_bar(label, total=total, unit="blocks", enabled=not as_json) as advance:
        num_shown = 0
        while True:
            advance(progress["num_done"] - num_shown)
            num_shown = progress["num_done"]
            if progress["phase"] == "done":
                return progress
            progress = _go_on(client, progress)


def _go_on(client: AdminClient, before: dict[str, Any]) -> Any:
    progress = client.call("cache_go_on", number=before["number"])
    if progress == before:
        time.sleep(_POLL_S)
    return progress


def _report(done: dict[str, Any], as_json: bool, verb: str, reason: str) -> None:  # noqa: FBT001
    if as_json:
        print_json(done)
        return
    num_blocks = done["num_blocks"] - done["num_left_out"]
    typer.echo(
        f"{verb} {num_blocks:,} of {done['num_blocks']:,} blocks "
        f"({format_bytes(num_blocks * done['block_bytes'])}) of {', '.join(done['tenants'])}"
    )
    if done["num_left_out"]:
        typer.echo(f"{done['num_left_out']:,} {reason}")
    if done["num_corrupt"]:
        typer.echo(f"{done['num_corrupt']:,} not what was saved: computed when needed")
