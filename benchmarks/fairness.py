"""How evenly tenants share a cache: `python benchmarks/fairness.py [TRACE]`, a trace with named blocks.

Without one, on the chat of `loads.py`. The trace of the kept figures is `conversation_trace.jsonl` of
https://github.com/kvcache-ai/Mooncake (FAST25-release/traces, Apache-2.0). It is dealt by conversation
(requests that share more than the blocks that all begin with) to tenants of equal weight, the first with
ten times the conversations of each other one; they share no blocks.
x = tokens saved ÷ tokens that the tenant saves alone in its share of the blocks, same policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

from common import RESULTS, output_flags, publish
from loads import chat

from sagellm.core import TraceRequest
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.metrics.fairness import jains_index
from sagellm.lab.simulation.bounds import replay
from sagellm.lab.traces import read_trace

POLICIES: dict[str, dict[str, Any]] = {
    "lru": {"prefix_cache.eviction_policy": "lru"},
    "reuse": {"prefix_cache.eviction_policy": "reuse"},
    "qos": {"prefix_cache.eviction_policy": "qos"},
    "qos, within: reuse": {"prefix_cache.eviction_policy": "qos{within=reuse}"},
}


def deal(requests: Sequence[TraceRequest], num_tenants: int, factor: int, seed: int) -> list[TraceRequest]:
    """Give whole conversations to tenants, `factor` times as many to the first as to each other one."""
    columns_of_ids = zip(*(one.block_ids for one in requests), strict=False)
    num_common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns_of_ids))
    key = [one.block_ids[num_common : num_common + 1] or (-index,) for index, one in enumerate(requests, 1)]
    conversations = sorted(set(key))
    Random(seed).shuffle(conversations)
    turns = [0] * factor + list(range(1, num_tenants))
    tenant = {name: turns[index % len(turns)] for index, name in enumerate(conversations)}
    return [replace(one, tenant=str(tenant[name])) for one, name in zip(requests, key, strict=True)]


def saved_by_tenant(
    requests: Sequence[TraceRequest], settings: dict[str, Any], blocks: int
) -> dict[str, int]:
    """Replay and add up what was saved."""
    values = {"kv.num_blocks": blocks, "kv.block_size": requests[0].block_tokens}
    replayed = replay(requests, EngineConfig().with_values(values | settings), lambda _: None)
    saved = dict.fromkeys(sorted({one.tenant for one in requests}), 0)
    for request, outcome in zip(requests, replayed, strict=True):
        saved[request.tenant] += outcome.num_saved_tokens
    return saved


def measure(requests: Sequence[TraceRequest], settings: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Replay all tenants together, and each one alone in its share."""
    together = saved_by_tenant(requests, settings, blocks)
    tenants = []
    for name, saved in together.items():
        own = [one for one in requests if one.tenant == name]
        alone = saved_by_tenant(own, settings, blocks // len(together))[name]
        num_tokens = sum(one.num_prompt_tokens for one in own)
        tenants.append(
            {
                "tenant": name,
                "num_requests": len(own),
                "num_prompt_tokens": num_tokens,
                "token_saving": saved / num_tokens,
                "token_saving_alone": alone / num_tokens,
                "x": saved / alone if alone else None,
            }
        )
    known = [one["x"] for one in tenants if one["x"] is not None]
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    return {
        "token_saving": sum(together.values()) / num_tokens,
        "jains_index": jains_index(known),
        "least_x": min(known),
        "tenants": tenants,
    }


def as_text(found: dict[str, dict[str, Any]]) -> str:
    """Show the policies, then the tenants of each."""
    lru = found["lru"]["token_saving"]
    rows = [
        (
            name,
            f"{one['token_saving']:.2%}",
            f"{one['token_saving'] / lru:.1%}",
            f"{one['jains_index']:.4f}",
            f"{one['least_x']:.3f}",
        )
        for name, one in found.items()
    ]
    parts = [columns(("POLICY", "SAVED", "OF LRU'S", "JAIN'S INDEX", "LEAST X"), rows)]
    for name, one in found.items():
        rows = [
            (
                tenant["tenant"],
                f"{tenant['num_requests']:,}",
                f"{tenant['token_saving']:.2%}",
                f"{tenant['token_saving_alone']:.2%}",
                "-" if tenant["x"] is None else f"{tenant['x']:.3f}",
            )
            for tenant in one["tenants"]
        ]
        parts.append(f"{name}\n{columns(('TENANT', 'REQUESTS', 'SAVED', 'ALONE', 'X'), rows)}")
    return "\n\n".join(parts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--prompts", type=int, default=4000, help="of the chat that is made without a trace")
    parser.add_argument("--blocks", type=int, default=5000)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--factor", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    output_flags(parser, "fairness")
    options = parser.parse_args()
    if options.trace is None and options.save == RESULTS / "fairness.json":
        options.save = RESULTS / "fairness-chat.json"
    whole = chat(options.seed, options.prompts) if options.trace is None else read_trace(options.trace)
    requests = deal(whole, options.tenants, options.factor, options.seed)
    found = {name: measure(requests, settings, options.blocks) for name, settings in POLICIES.items()}
    publish(
        "fairness",
        as_text(found),
        options,
        trace="chat" if options.trace is None else options.trace.name,
        blocks=options.blocks,
        seed=options.seed,
        policies=found,
    )


if __name__ == "__main__":
    main()
