"""`pool stats|compact`: the KV pool of a running engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from sagellm.core import KVPoolMetrics
from sagellm.engines.progress import progress_bar
from sagellm.server.cli.running import AsJson, EngineArgument, EngineName, connect, show
from sagellm.server.cli.stats import pool as app
from sagellm.server.remote import AdminClient


@app.command()
def compact(
    name: EngineArgument = None,
    *,
    engine: EngineName = None,
    as_json: AsJson = False,
) -> None:
    """Bring the free blocks together: live ones move to the beginning, a few between two steps.

    Requests go on meanwhile. Ctrl-C ends it at any moment; what has moved has moved.
    """
    _, client = connect(name, engine)
    with client:
        result = _compact(client, show_bar=not as_json)
    show(result, _compacted(result), as_json=as_json)


def _compacted(result: dict[str, Any]) -> Iterator[str]:
    before, after = (result[f"external_fragmentation_{when}"] for when in ("before", "after"))
    yield (
        f"moved {result['num_moved_blocks']:,} blocks in {result['num_steps']:,} steps and "
        f"{result['duration_s']:.2f} s, {result['moving_s']:.3f} s of them moving"
    )
    yield f"external fragmentation {before:.1%} before, {after:.1%} now"
    yield (
        f"largest free run {result['largest_free_run_before']:,} blocks before, "
        f"{result['largest_free_run_after']:,} of {result['num_free_blocks']:,} free ones now"
    )
    if result["num_misplaced_blocks"]:
        yield f"{result['num_misplaced_blocks']:,} blocks are out of place again, as requests went on"


def _compact(client: AdminClient, *, show_bar: bool) -> dict[str, Any]:
    """Move blocks until none is left to move, or as many as were in use have been moved."""
    started = time.perf_counter()
    before = _read(client)
    num_moved = num_steps = 0
    moving_s = 0.0
    total = before.num_misplaced_blocks
    with progress_bar("compacting", total=total, unit="blocks", enabled=show_bar) as advance:
        while num_moved < before.num_used_blocks:
            done = client.call("pool_compact")
            if not done["num_moved_blocks"]:
                break
            num_moved += done["num_moved_blocks"]
            moving_s += done["moving_s"]
            num_steps += 1
            advance(done["num_moved_blocks"])
    after = _read(client)
    return {
        "num_moved_blocks": num_moved,
        "num_steps": num_steps,
        "duration_s": time.perf_counter() - started,
        "moving_s": moving_s,
        "external_fragmentation_before": before.external_fragmentation,
        "external_fragmentation_after": after.external_fragmentation,
        "largest_free_run_before": before.largest_free_run,
        "largest_free_run_after": after.largest_free_run,
        "num_free_blocks": after.num_free_blocks,
        "num_misplaced_blocks": after.num_misplaced_blocks,
    }


def _read(client: AdminClient) -> KVPoolMetrics:
    pool: KVPoolMetrics = client.metrics().modules["kv_pool"]
    return pool
