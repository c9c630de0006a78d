"""The cost of authenticating a block: xxh3 in memory, keyed BLAKE2b in files and servers.

python benchmarks/sealing.py [--json] [--save FILE]: microseconds for one block of 16 tokens of Qwen3-0.6B's
shape and for 1 MiB, by the code that tiers run: the digest of the data, the head of the record, reading that
head, and refusing one that is not ours.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from common import output_flags, publish, spread

from sagellm.core import BlockHeader, KVIdentity, Namespace, pack
from sagellm.core.store_key import StoreKey
from sagellm.kvmgr.kv_pool.tiers.record import Checksums, RecordFormat

BLOCK_TOKENS = 16
KV_BYTES_PER_TOKEN = 28 * 2 * 8 * 128 * 2
"""28 layers, keys and values, 8 heads of 128 in bf16: the shape of Qwen3-0.6B."""

SIZES = {"block of 16 tokens, 0.6B": BLOCK_TOKENS * KV_BYTES_PER_TOKEN, "1 MiB": 1 << 20}
NUM_RUNS = 200


def times_us(work: Callable[[], object], num_runs: int = NUM_RUNS) -> dict[str, Any]:
    """Return microseconds per call."""
    work()
    times = []
    for _ in range(num_runs):
        started_ns = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - started_ns) / 1e3)
    return spread(times, digits=2)


def measure(records: RecordFormat) -> dict[str, Any]:
    """Return the costs of one record format."""
    identity = KVIdentity("0" * 32, "v1:28x8x128:b16:bfloat16", "bfloat16")
    header = BlockHeader.of(bytes(16), pack(list(range(BLOCK_TOKENS))), Namespace("tenant"), identity)
    found: dict[str, Any] = {}
    for name, size in SIZES.items():
        data = memoryview(os.urandom(size))
        found[name] = times_us(lambda data=data: records.digest_of(header, data))  # type: ignore[misc]
        found[name]["bytes"] = size
        found[name]["gb_a_second"] = round(size / found[name]["median"] / 1e3, 2)
    digest = records.digest_of(header, memoryview(b""))
    head = records.encode_head(header, 0, digest, 0)
    found["head, written"] = times_us(lambda: records.encode_head(header, 0, digest, 0), 10 * NUM_RUNS)
    found["head, read"] = times_us(lambda: records.decode_head(head, 0), 10 * NUM_RUNS)
    found["prefix, refused"] = times_us(lambda: records.read_prefix(head, 1), 10 * NUM_RUNS)
    return found


def main() -> None:
    """Print a table, or JSON, and keep the latter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output_flags(parser, "sealing")
    options = parser.parse_args()
    ways = {
        "xxh3": measure(RecordFormat(Checksums())),
        "blake2b": measure(RecordFormat(StoreKey.fresh())),
    }
    lines = [f"{'µs: min / median / p99':<28}{'xxh3':>28}{'keyed BLAKE2b':>28}"]
    for name in ways["xxh3"]:
        cells = (
            " / ".join(f"{ways[way][name][which]:,.1f}" for which in ("min", "median", "p99")) for way in ways
        )
        lines.append(f"{name:<28}" + "".join(f"{cell:>28}" for cell in cells))
    publish("sealing", "\n".join(lines), options, ways=ways)


if __name__ == "__main__":
    main()
