"""Rates for replays from what was measured: `python benchmarks/tier_costs.py RESULT > COSTS`.

RESULT is what `tier_prefill.py` kept for a model of the 0.6B shape. Two of its times give the two rates of
computing: all tokens from the first one on, and those behind what was fetched, less the fetch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from sagellm.kvmgr.kv_pool.prefill_rate import PrefillRate
from sagellm.lab.simulation.step_costs import prefill_work

KV_BYTES_PER_TOKEN = 28 * 2 * 8 * 128 * 2
"""28 layers, keys and values, 8 heads of 128 in bf16: the shape of Qwen3-0.6B."""

FASTER = 100
"""How much faster an accelerator computes; assumed, not measured."""

PLACES = (("host", "fast"), ("file", "fast"), ("file, not in memory", "slow"))


def costs_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return rates by set; 0.6B in bf16, whatever `tier_prefill` was given."""
    num_tokens, num_stored = result["num_tokens"], result["num_stored_tokens"]
    places = [(result["places"][name], which) for name, which in PLACES]
    cold_s = median(place["cold_s"]["median"] for place, _ in places)
    rest_s = median(
        place["ttft_s"]["always"]["median"] - num_stored * KV_BYTES_PER_TOKEN / place["bytes_a_second"][which]
        for place, which in places
    )
    rate = PrefillRate()
    for start, seconds in ((0, cold_s), (num_stored, rest_s)):
        num_computed = num_tokens - start
        rate.measure(num_computed, prefill_work(num_computed, start).num_pairs, round(seconds * 1e9))
    host = round(result["places"]["host"]["bytes_a_second"]["fast"])
    disk = round(result["places"]["file, not in memory"]["bytes_a_second"]["slow"])
    fast = {
        "prefill_ns_per_token": round(rate.ns_a_token / FASTER),
        "prefill_ns_per_token_context": round(rate.ns_a_token_context / FASTER, 2),
    }
    return {
        "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
        "prefill_ns_per_token": round(rate.ns_a_token),
        "prefill_ns_per_token_context": round(rate.ns_a_token_context),
        "tier_bytes_per_s": {"host": host, "file": disk},
        "sets": {
            "measured": {"about": "computing on this CPU, copies in host memory, a disk without page cache"},
            "fast": {"about": f"the same copies, computing {FASTER} times as fast: assumed", **fast},
            "fast, remote file": {
                "about": "the same, the file behind a link of 1 Gbit/s: assumed",
                **fast,
                "tier_bytes_per_s": {"host": host, "file": 125_000_000},
            },
        },
    }


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    result = json.loads(options.result.read_text(encoding="utf-8"))
    source = {
        "shape": "Qwen3-0.6B: 28 layers, 8 KV heads of 128, bf16",
        "measured_by": "python benchmarks/make_model.py DIR; python benchmarks/tier_prefill.py DIR",
        "result": options.result.name,
        "cpu": result["machine"]["cpu"],
        "made_by": f"python benchmarks/tier_costs.py {options.result}",
    }
    print(json.dumps(source | costs_of(result), indent=1))


if __name__ == "__main__":
    main()
