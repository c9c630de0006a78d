"""TTFT of a prompt whose beginning was evicted to a tier, against computing all of it.

`python benchmarks/tier_prefill.py MODEL`: prompts of 2,048 tokens, 1,920 of them stored in host memory, in a
file that the system has in memory, and in that file after the system was told to forget it; fetched,
computed, and as the rule chooses. MODEL is a directory, such as `benchmarks/make_model.py` makes.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from typing import Any

from common import foreign_cores, output_flags, publish, spread

from sagellm.core.protocols.kv_offload import FetchRule
from sagellm.core.random_access import SystemRandomAccessFile
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.cli.output import columns
from sagellm.kvmgr.kv_pool.offload import KVOffload

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
RULES: tuple[FetchRule, ...] = ("always", "never", "cheaper")


class Subject:
    """An engine with one tier, and prompts whose beginning is there."""

    def __init__(self, model: str, tiers: dict[str, Any], num_tokens: int, num_stored: int) -> None:
        self.num_tokens, self.num_stored = num_tokens, num_stored
        self.engine = LLMEngine(
            model=model, num_blocks=2 * num_tokens // 16, max_num_batched_tokens=num_tokens, kv_tiers=tiers
        )
        self.kv = self.engine.client.core.kv
        assert isinstance(self.kv.offload, KVOffload)
        self.offload = self.kv.offload
        guarded = self.offload.tiers._tiers[0].tier
        self.tier = getattr(guarded, "tier", guarded)  # a file's has a thread of its own around it
        self.random = random.Random(0)
        self.ttft(self.some(num_tokens))  # warm-up; the rule learns from it

    def some(self, num_tokens: int) -> list[int]:
        """Return random tokens."""
        return [self.random.randrange(100, 5000) for _ in range(num_tokens)]

    def ttft(self, prompt: list[int]) -> float:
        """Compute one token."""
        begin = time.perf_counter()
        self.engine.generate(prompt, ONE_TOKEN)
        return time.perf_counter() - begin

    def stored(self, rule: FetchRule, *, is_dropped: bool) -> tuple[float, bool]:
        """Evict a prompt, ask for its beginning with another end, and say whether it was fetched."""
        prompt = self.some(self.num_tokens)
        self.offload.rule = "never"
        self.ttft(prompt)
        self.kv.evict(10**6)
        if is_dropped:
            drop_cache(self.tier.backend.file)
        self.offload.rule = rule
        before = self.offload.metrics().num_fetched_blocks
        follow_up = [*prompt[: self.num_stored], 9, *self.some(self.num_tokens - self.num_stored - 1)]
        seconds = self.ttft(follow_up)
        self.kv.evict(10**6)
        return seconds, self.offload.metrics().num_fetched_blocks > before


def drop_cache(file: SystemRandomAccessFile) -> None:
    """Write back, then advise the system that it needs no page of the file."""
    os.fdatasync(file._descriptor)
    os.posix_fadvise(file._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return times in seconds by where the beginning was, and what the tiers' rates were."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for place, tiers in (
            ("host", {"host": "8GiB"}),
            ("file", {"file": {"max_bytes": "8GiB", "folder": folder}}),
        ):
            subject = Subject(model, tiers, options.tokens, options.stored)
            for is_dropped in (False, True)[: 1 + (place == "file")]:
                times: dict[str, list[float]] = {rule: [] for rule in RULES}
                cold, choices = [], []
                for _ in range(options.rounds):
                    cold.append(subject.ttft(subject.some(options.tokens)))
                    for rule in RULES:
                        seconds, is_fetched = subject.stored(rule, is_dropped=is_dropped)
                        times[rule].append(seconds)
                        if rule == "cheaper":
                            choices.append("fetched" if is_fetched else "computed")
                median = spread(cold)["median"]
                name = "file, not in memory" if is_dropped else place
                found[name] = {
                    "cold_s": spread(cold),
                    "ttft_s": {rule: spread(values) for rule, values in times.items()},
                    "share_of_cold": {
                        rule: round(spread(values)["median"] / median, 4) for rule, values in times.items()
                    },
                    "rule_chose": choices,
                    "bytes_a_second": subject.tier.rates(),
                    "prefill_tokens_a_second": subject.offload.metrics().prefill_tokens_a_second,
                }
            subject.offload.close()
    return found


def as_text(found: dict[str, Any]) -> str:
    """Write a row a place."""
    rows = [
        (
            place,
            f"{one['cold_s']['median']:.2f}",
            *(f"{one['ttft_s'][rule]['median']:.3f} ({one['share_of_cold'][rule]:.1%})" for rule in RULES),
            ", ".join(sorted(set(one["rule_chose"]))),
            f"{one['bytes_a_second']['fast'] / 1e9:.3g} / {one['bytes_a_second']['slow'] / 1e9:.3g}",
        )
        for place, one in found.items()
    ]
    head = ("STORED IN", "COLD: S", "FETCHED", "COMPUTED", "BY THE RULE", "IT CHOSE", "GB/S MEMORY / DISK")
    return columns(head, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--stored", type=int, default=1920)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the file lies; default: the system's temporary folder")
    output_flags(parser, "tier-prefill")
    options = parser.parse_args()
    busy = foreign_cores()
    found = measure(options.model, options)
    publish(
        "tier_prefill",
        as_text(found),
        options,
        foreign_cores=busy,
        num_tokens=options.tokens,
        num_stored_tokens=options.stored,
        places=found,
    )


if __name__ == "__main__":
    main()
