"""How much time tiers below the device save on a trace: `python benchmarks/tier_replay.py TRACE`.

First the rule: never fetching, always fetching, and fetching where that is cheaper, for several costs. Then
the classifier: half way the load shifts, and requests come `--speed` times as fast; thresholds are swept over
what came before, and the best ones kept for what comes after, beside those that adapt. No forward pass:
costs are given (`--costs`), which `tier_costs.py` makes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from common import output_flags, publish

from sagellm.core import StepCost, TraceRequest
from sagellm.core.protocols.kv_offload import FetchRule
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.progress import progress_bar
from sagellm.lab.simulation.step_costs import StepCosts
from sagellm.lab.simulation.tier_replay import SavedTime, TierReplay, TierSettings
from sagellm.lab.traces import read_trace

CASES = (
    ("measured", ("host",)),
    ("fast", ("file",)),
    ("fast", ("host", "file")),
    ("fast, remote file", ("host", "file")),
)
RULES: tuple[FetchRule, ...] = ("never", "always", "cheaper")
HOT, WARM, TIMEOUT_S = (0.003, 0.01, 0.1, 10.0), 0.1, (30.0, 300.0)
"""Thresholds that are swept: uses a second for hot, that share of it for warm, and the timeout."""


class Sizes(NamedTuple):
    """Blocks of the device and of the tiers."""

    device: int
    host: int
    file: int


class Subject(NamedTuple):
    """A load, on a device."""

    requests: Sequence[TraceRequest]
    config: EngineConfig
    sizes: Sizes
    costs: dict[str, StepCosts]


def read_costs(path: Path) -> dict[str, StepCosts]:
    """Read sets of costs by name; values at the top of the file apply to every set."""
    content = json.loads(path.read_text(encoding="utf-8"))

    def costs(given: dict[str, Any]) -> StepCosts:
        values = content | given
        per_token, per_pair = values["prefill_ns_per_token"], values["prefill_ns_per_token_context"]
        return StepCosts(
            source=path.name,
            device="cpu",
            step=StepCost(token_ns=per_token, pair_ns=per_pair),
            kv_bytes_per_token=values["kv_bytes_per_token"],
            tier_bytes_per_s=values["tier_bytes_per_s"],
        )

    return {name: costs(given) for name, given in content["sets"].items()}


def judge_rules(subject: Subject, advance: Any) -> list[dict[str, Any]]:
    """Replay under each rule, with each set of costs and tiers."""
    found = []
    for name, places in CASES:
        # a file alone is as large as the host tier
        tiers = {place: getattr(subject.sizes, place if len(places) > 1 else "host") for place in places}
        saved: dict[str, SavedTime] = {}
        for rule in RULES:
            settings = TierSettings(num_blocks=tiers, rule=rule)
            saved[rule] = TierReplay(subject.config, subject.costs[name], settings).run(subject.requests)
            advance(len(subject.requests))
        found.append(
            {"costs": name, "tiers": tiers, "rules": {rule: entry(one) for rule, one in saved.items()}}
        )
    return found


def judge_classifier(subject: Subject, advance: Any) -> dict[str, Any]:
    """Sweep thresholds over the first half; replay the second one with the best and with those that adapt."""
    half = len(subject.requests) // 2
    before, after = subject.requests[:half], subject.requests[half:]
    tiers = {"host": subject.sizes.host, "file": subject.sizes.file}
    swept, best, most_s = [], None, float("-inf")

    def replay_first(**thresholds: float) -> tuple[TierReplay, SavedTime]:
        settings = TierSettings(num_blocks=tiers, thresholds=thresholds)
        replayed = TierReplay(subject.config, subject.costs["measured"], settings)
        saved = replayed.run(before)
        advance(half)
        return replayed, saved

    for hot, timeout_s in product(HOT, TIMEOUT_S):
        thresholds = {
            "hot_frequency_threshold": hot,
            "warm_frequency_threshold": hot * WARM,
            "cold_timeout_s": timeout_s,
        }
        replayed, saved = replay_first(**thresholds, adapts=False)
        swept.append({**thresholds, "saved_s": round(saved.saved_s)})
        if saved.saved_s > most_s:
            most_s, best, kept = saved.saved_s, replayed, thresholds
    assert best is not None, "something was swept"
    adaptive, saved = replay_first()
    found = {"fixed": entry(best.run(after)), "adaptive": entry(adaptive.run(after))}
    advance(2 * len(after))
    return {"tiers": tiers, "before": swept, "adaptive_before": entry(saved), "best": kept, "after": found}


def entry(saved: SavedTime) -> dict[str, Any]:
    """Return the figures of a replay."""
    figures = {"saved_s": saved.saved_s, "share": saved.share, "token_saving": saved.token_saving}
    return {name: round(value, 5) for name, value in (asdict(saved) | figures).items()}


def shifted(requests: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """Let the second half come `speed` times as fast."""
    half = len(requests) // 2
    start_s = requests[half].arrival_s
    later = (replace(one, arrival_s=start_s + (one.arrival_s - start_s) / speed) for one in requests[half:])
    return [*requests[:half], *later]


def as_text(rules: Sequence[dict[str, Any]], classifier: dict[str, Any]) -> str:
    """Write a row a rule, then one for each classifier after the shift."""
    head = (
        "COSTS",
        "TIERS",
        "RULE",
        "TIME SAVED: s",
        "OF ALL",
        "TOKENS SAVED",
        "FETCHED",
        "COMPUTED INSTEAD",
    )
    rows = [
        (
            case["costs"],
            ", ".join(f"{name} {num:,}" for name, num in case["tiers"].items()),
            rule,
            *_cells(one),
            f"{one['num_computed_instead']:,}",
        )
        for case in rules
        for rule, one in case["rules"].items()
    ]
    best = ", ".join(f"{value:g}" for value in classifier["best"].values())
    names = {"fixed": f"best before: {best}", "adaptive": "adaptive"}
    after = [(names[name], *_cells(one)) for name, one in classifier["after"].items()]
    return f"{columns(head, rows)}\n\n{columns(('THRESHOLDS, AFTER THE SHIFT', *head[3:7]), after)}"


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{one['saved_s']:,.0f}",
        f"{one['share']:.2%}",
        f"{one['token_saving']:.2%}",
        f"{one['num_fetched_blocks']:,}",
    )


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--costs", type=Path, default=Path(__file__).parent / "costs-0.6b.json")
    parser.add_argument("--blocks", type=int, nargs=3, default=Sizes(1000, 10_000, 20_000), metavar="INT")
    parser.add_argument("--block-size", type=int, help="default: the trace's own, else 16")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--speed", type=float, default=10.0, help="of the second half; default: %(default)s")
    output_flags(parser, "tier-replay")
    options = parser.parse_args()
    requests = read_trace(options.trace, limit=options.limit)
    sizes = Sizes(*options.blocks)
    block_size = options.block_size or requests[0].block_tokens or 16
    config = EngineConfig().with_values({"kv.block_size": block_size, "kv.num_blocks": sizes.device})
    subject = Subject(requests, config, sizes, read_costs(options.costs))
    num_replays = len(CASES) * len(RULES) + (len(HOT) * len(TIMEOUT_S) + 3) / 2
    with progress_bar("replaying", total=round(num_replays * len(requests))) as advance:
        rules = judge_rules(subject, advance)
        shift = subject._replace(requests=shifted(requests, options.speed))
        classifier = judge_classifier(shift, advance)
    publish(
        "tier_replay",
        as_text(rules, classifier),
        options,
        trace=options.trace.name,
        block_size=block_size,
        blocks=sizes._asdict(),
        costs=options.costs.name,
        speed_after_shift=options.speed,
        rules=rules,
        classifier=classifier,
    )


if __name__ == "__main__":
    main()
