"""`cache …`: inspects, changes, saves and loads the prefix cache of a running engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from sagellm.core import ConfigError, InvalidInputError
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.output import columns
from sagellm.engines.cli.targets import confirm_overwriting
from sagellm.engines.progress import progress_bar
from sagellm.engines.sizes import format_bytes
from sagellm.server.cli.figures import write_duration
from sagellm.server.cli.names import complete_save
from sagellm.server.cli.prefix_flags import PREFIX_FLAGS, read_prefix, request_name
from sagellm.server.cli.running import AsJson, EngineArgument, EngineName, ask, connect, show
from sagellm.server.cli.stats import cache as app
from sagellm.server.remote import AdminClient

RequestName = Annotated[
    str | None,
    typer.Argument(
        metavar="[REQUEST]",
        help="Id of an answer, or its first 4 characters or more. [default: the latest]",
    ),
]

_CAUSES = {
    "none": "all of it was cached",
    "never_seen": "no request of this tenant and salt had what comes next, and nobody else has it cached",
    "evicted": "what comes next was cached once and was evicted",
    "other_tenant": "what comes next is cached for another tenant or salt, which is not shared",
    "block_border": "what comes next agrees with cached tokens, but for less than a block",
    "disabled": "prefix caching is off",
    "scored": "its prompt is scored (prompt_logprobs), so all of it is computed and nothing is looked up",
    "one_token": "the last token of a prompt is always computed, and it has no other",
    "unknown": "what comes next may have been evicted longer ago than the cache remembers",
}

_REASONS = {
    "evicted": "chosen by",
    "quota": "as its tenant was at its quota",
    "cleared": "when the cache was cleared",
}
_POLL_S = 0.05

SaveName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the save; never a path.")]
ExistingName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the save; never a path.", autocompletion=complete_save),
]


@app.command()
def why(request: RequestName = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """Say why a request did not reuse more of the cache than it did."""
    found = ask("cache_why", engine, request=request_name(request))
    head = f"request {found['request_id']} of tenant {found['tenant']}, {found['admitted_s_ago']:.1f} s ago"
    show(found, (head, *describe_miss(found)), as_json=as_json)


def describe_miss(found: Mapping[str, Any]) -> Iterator[str]:
    """Say in lines why a request did not reuse more, given the result of `cache_why`."""
    reused, total = found["match_length"], found["num_tokens"]
    if total:
        yield f"reused {reused:,} of the {total:,} tokens that could be"
    yield f"cause: {found['cause']}: {_CAUSES[found['cause']]}"
    if found["cause"] not in ("none", "disabled", "scored", "one_token"):
        yield f"position of its first token that is not cached: {found['diverges_at']:,}"
    if found["cause"] == "evicted":
        whom = f", for tenant {found['evicted_for']}" if found["evicted_for"] else ""
        yield (
            f"dropped {found['evicted_s_before']:.1f} s before, {_REASONS[found['reason']]} "
            f"{found['policy'] or ''}".rstrip()
            + f"{whom}; {found['num_evicted_blocks']:,} blocks in a row are gone"
        )


@app.command()
@with_flags(PREFIX_FLAGS)
def pin(
    request: RequestName = None,
    *,
    ttl: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="End it when no request has used it for this long. [default: never]",
        ),
    ] = None,
    engine: EngineName = None,
    as_json: AsJson = False,
    **prefix: Any,
) -> None:
    """Keep the prompt of a request, or the beginning of prompts, whatever else is evicted.

    Only what is cached can be pinned, in whole blocks. Pins end with the engine.
    """
    _, client = connect(engine)
    with client:
        result = client.call("cache_pin", ttl_s=ttl, **read_prefix(client, request, prefix))
    told = f"pinned {result['num_pinned_tokens']:,} of {result['num_tokens']:,} tokens"
    reason = f": {result['reason']}" if result["reason"] else ""
    show(result, (told + reason, _budget(result)), as_json=as_json)
    if not as_json and not result["num_pinned_tokens"]:
        raise typer.Exit(1)


@app.command()
@with_flags(PREFIX_FLAGS)
def unpin(
    request: RequestName = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="End every pin.")] = False,
    engine: EngineName = None,
    as_json: AsJson = False,
    **prefix: Any,
) -> None:
    """End the pins within the prompt of a request, or within a beginning of prompts."""
    if everything and (request is not None or prefix):
        raise InvalidInputError("--all ends every pin; give it without a request or a prefix")
    _, client = connect(engine)
    with client:
        if everything:
            result = client.call("cache_unpin_all")
        else:
            result = client.call("cache_unpin", **read_prefix(client, request, prefix))
    _say(result, as_json, f"ended {result['num_unpinned']:,} pins")


@app.command()
def pins(name: EngineArgument = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """List what is pinned: whose, how many tokens, how long yet if no request uses it."""
    result = ask("cache_pins", name, engine)
    rows = [
        (pin["tenant"], f"{pin['num_tokens']:,}", *(_duration(pin[name]) for name in ("ttl_s", "left_s")))
        for pin in result["pins"]
    ]
    table = columns(("TENANT", "TOKENS", "TTL", "LEFT"), rows) if rows else "nothing is pinned"
    show(result, (table, _budget(result)), as_json=as_json)


@app.command()
def clear(name: EngineArgument = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """Drop everything that no request uses and nothing pins."""
    result = ask("cache_clear", name, engine)
    _say(result, as_json, f"dropped {result['num_dropped_blocks']:,} blocks")


@app.command()
def evict(
    num_blocks: Annotated[int, typer.Argument(metavar="BLOCKS", help="How many blocks.")],
    *,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Drop blocks now, in the order of the eviction policy."""
    if num_blocks < 1:
        raise InvalidInputError(f"{num_blocks} blocks cannot be evicted; give at least 1")
    result = ask("cache_evict", engine, num_blocks=num_blocks)
    _say(result, as_json, f"dropped {result['num_dropped_blocks']:,} blocks")


def _duration(seconds: float | None) -> str:
    return "no end" if seconds is None else write_duration(seconds)


def _budget(result: Mapping[str, Any]) -> str:
    return f"{result['num_pinned_blocks']:,} of at most {result['max_pinned_blocks']:,} blocks are pinned"


def _say(result: Mapping[str, Any], as_json: bool, done: str) -> None:  # noqa: FBT001
    if "num_blocks" in result:
        left = f"{result['num_blocks']:,} are left, {result['num_locked_blocks']:,} of them in use or pinned"
    else:
        left = f"{result['num_pins']:,} pins are left, of {result['num_pinned_blocks']:,} blocks"
    show(result, (done, left), as_json=as_json)


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
def saves(name: EngineArgument = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """List what is saved."""
    found = ask("cache_saves", name, engine)
    rows = [(each["name"], format_bytes(each["num_bytes"])) for each in found]
    show(found, [columns(("NAME", "SIZE"), rows) if rows else "nothing is saved"], as_json=as_json)


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
    show(done, [f"deleted {name}, {format_bytes(done['num_bytes'])}"], as_json=as_json)


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
    num_blocks = done["num_blocks"] - done["num_left_out"]
    lines = [
        f"{verb} {num_blocks:,} of {done['num_blocks']:,} blocks "
        f"({format_bytes(num_blocks * done['block_bytes'])}) of {', '.join(done['tenants'])}"
    ]
    if done["num_left_out"]:
        lines.append(f"{done['num_left_out']:,} {reason}")
    if done["num_corrupt"]:
        lines.append(f"{done['num_corrupt']:,} not what was saved: computed when needed")
    show(done, lines, as_json=as_json)
