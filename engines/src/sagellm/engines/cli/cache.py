"""`cache …`: inspects and changes the prefix cache of a running engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sagellm.core import InvalidInputError
from sagellm.engines.cli.cache_saves import delete as delete, load as load, save as save, saves as saves
from sagellm.engines.cli.figures import write_duration
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.cli.prefix_flags import PREFIX_FLAGS, read_prefix, request_name
from sagellm.engines.cli.running import EngineName, connect
from sagellm.engines.cli.stats import cache as app

RequestName = Annotated[
    str | None,
    typer.Argument(
        metavar="[REQUEST]",
        help="Id of an answer, or its first 4 characters or more. [default: the latest]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_CAUSES = {
    "none": "all of it was cached",
    "never_seen": "no request of this tenant and salt had what comes next, and no other has it cached",
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


@app.command()
def why(request: RequestName = None, *, engine: EngineName = None, as_json: AsJson = False) -> None:
    """Say why a request did not reuse more of the cache than it did."""
    _, client = connect(engine)
    with client:
        found = client.call("cache_why", request=request_name(request))
    if as_json:
        print_json(found)
        return
    reused, total = found["match_length"], found["num_tokens"]
    typer.echo(
        f"request {found['request_id']} of tenant {found['tenant']}, {found['admitted_s_ago']:.1f} s ago"
    )
    if total:
        typer.echo(f"reused {reused:,} of the {total:,} tokens that could be")
    typer.echo(f"cause: {found['cause']}: {_CAUSES[found['cause']]}")
    if found["cause"] not in ("none", "disabled", "scored", "one_token"):
        typer.echo(f"position of its first token that is not cached: {found['diverges_at']:,}")
    if found["cause"] == "evicted":
        whom = f", for tenant {found['evicted_for']}" if found["evicted_for"] else ""
        typer.echo(
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
            metavar="SECONDS", min=0.001, help="End it when no request used it for so long. [default: never]"
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
    if as_json:
        print_json(result)
        return
    typer.echo(
        f"pinned {result['num_pinned_tokens']:,} of {result['num_tokens']:,} tokens"
        + (f": {result['reason']}" if result["reason"] else "")
    )
    typer.echo(_budget(result))
    if not result["num_pinned_tokens"]:
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
def pins(*, engine: EngineName = None, as_json: AsJson = False) -> None:
    """List what is pinned: whose, how many tokens, how long yet if no request uses it."""
    _, client = connect(engine)
    with client:
        result = client.call("cache_pins")
    if as_json:
        print_json(result)
        return
    rows = [
        (pin["tenant"], f"{pin['num_tokens']:,}", *(_duration(pin[name]) for name in ("ttl_s", "left_s")))
        for pin in result["pins"]
    ]
    typer.echo(columns(("TENANT", "TOKENS", "TTL", "LEFT"), rows) if rows else "nothing is pinned")
    typer.echo(_budget(result))


@app.command()
def clear(*, engine: EngineName = None, as_json: AsJson = False) -> None:
    """Drop everything that no request uses and nothing pins."""
    _, client = connect(engine)
    with client:
        result = client.call("cache_clear")
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
    _, client = connect(engine)
    with client:
        result = client.call("cache_evict", num_blocks=num_blocks)
    _say(result, as_json, f"dropped {result['num_dropped_blocks']:,} blocks")


def _duration(seconds: float | None) -> str:
    return "no end" if seconds is None else write_duration(seconds)


def _budget(result: Mapping[str, Any]) -> str:
    return f"{result['num_pinned_blocks']:,} of at most {result['max_pinned_blocks']:,} blocks are pinned"


def _say(result: Mapping[str, Any], as_json: bool, done: str) -> None:  # noqa: FBT001
    if as_json:
        print_json(result)
        return
    typer.echo(done)
    if "num_blocks" in result:
        typer.echo(
            f"{result['num_blocks']:,} are left, {result['num_locked_blocks']:,} of them in use or pinned"
        )
    else:
        typer.echo(f"{result['num_pins']:,} pins are left, of {result['num_pinned_blocks']:,} blocks")
