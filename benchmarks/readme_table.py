"""Writes the README's tables from the kept results; a test checks that they agree.

python benchmarks/readme_table.py            # writes README.md
python benchmarks/readme_table.py --check    # exits 1 if README.md differs from what it would write
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN = "<!-- measured: written by benchmarks/readme_table.py -->\n"
END = "<!-- end of measured -->"
FORWARD_BEGIN = "<!-- beside peers: written by benchmarks/readme_table.py -->\n"
FORWARD_END = "<!-- end of beside peers -->"


@dataclass(frozen=True)
class Row:
    """One line of the table: `figure` turns the kept result into text."""

    what: str
    result: str
    command: str
    figure: Callable[[dict[str, Any]], str]


def times(figures: dict[str, Any]) -> str:
    """Format a ratio: median (min)."""
    return f"{figures['median']:.2f}× ({figures['min']:.2f}×)"


def micros(figures: dict[str, Any], digits: int = 1) -> str:
    """Format microseconds: median (min)."""
    return f"{figures['median']:,.{digits}f} us ({figures['min']:,.{digits}f} us)"


def share(value: float, digits: int = 0) -> str:
    """Format a share of one in percent."""
    return f"{100 * value:.{digits}f} %"


def select(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the only row that has these values."""
    (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return found


def beside_peers(call: str, size: str | int) -> Callable[[dict[str, Any]], str]:
    """Format our time of a call and, where they have it, those of vLLM and SGLang, won or lost."""

    def figure(result: dict[str, Any]) -> str:
        us = select(result["rows"], call=call, size=size)["us"]
        peers = (
            f"{name} {us[key]['median']:,.1f}"
            for key, name in (("ours, lru", "`lru`"), ("vllm", "vLLM"), ("sglang", "SGLang"))
            if key in us
        )
        return "; ".join([micros(us["ours"]), *peers])

    return figure


def fetched_share(result: dict[str, Any]) -> str:
    """Format TTFT with KV from a tier as a share of computing it, by place."""
    places = result["places"]
    return "; ".join(f"{place} {share(of['share_of_cold']['always'])}" for place, of in places.items())


def saving(result: dict[str, Any]) -> str:
    """Format the share of prompt tokens saved by LRU and the default policy, by capacity."""
    lru, ours = (result["policies"][name] for name in ("lru", "reuse"))
    return "; ".join(
        f"{a['capacity']:,}: {share(b['token_saving'], 1)} ({share(a['token_saving'], 1)})"
        for a, b in zip(lru, ours, strict=True)
    )


def beside_neighbours(result: dict[str, Any]) -> str:
    """Format what neighbours make of a request's time: as the engine comes, and with all threads."""
    rows = result["request_ms"]
    alone = rows["all threads"]["beside 0"]["median"]
    texts = {
        name: "; ".join(f"{of['median'] / alone:.2f}×" for of in row.values()) for name, row in rows.items()
    }
    return f"{texts['as it comes']} (all threads {texts['all threads']})"


def prefill_s(result: dict[str, Any], way: str) -> float:
    """Return the median time of a prefill."""
    return float(result["ways"][way]["prefill_s"]["median"])


def eviction_costs(result: dict[str, Any]) -> str:
    """Format the median cost of evicting a block: LRU, the default and the slowest policy."""
    costs = {row["policy"]: row["evict_16_us_a_block"]["median"] for row in result["evictions"]}
    slowest = max(costs, key=lambda name: costs[name])
    shown = f"`lru` {costs['lru']:.1f}, `reuse` {costs['reuse']:.1f}"
    return f"{shown} us" if slowest == "reuse" else f"{shown}, `{slowest}` {costs[slowest]:.1f} us"


def compaction(result: dict[str, Any]) -> str:
    """Format external fragmentation around a compaction and what it does to ITL."""
    load = result["load"]
    (done,) = load["compactions"][:1]
    return (
        f"{done['external_fragmentation_before']:.2f} → {done['external_fragmentation_after']:.2f}; "
        f"ITL p99 {load['itl_p99_ratio']:.2f}×"
    )


ROWS = [
    Row(
        "16 requests at once ÷ one after another, output tokens/s",
        "batching-zen4-2core",
        "batching.py MODEL",
        lambda r: times(r["batching_gain"]),
    ),
    Row(
        "one request (128 + 128 tokens) ÷ `transformers`' `generate`, tokens/s",
        "batching-zen4-2core",
        "batching.py MODEL",
        lambda r: times(r["ratio"]),
    ),
    Row(
        "sequences at once ÷ 4,096 tokens reserved each, Azure trace",
        "paged_capacity",
        "paged_capacity.py",
        lambda r: times(r["memory_use_gain"]),
    ),
    Row(
        "KV in use that holds live tokens, same run",
        "paged_capacity",
        "paged_capacity.py",
        lambda r: share(r["utilisation_by_live_tokens"]["median"]),
    ),
    Row(
        "KV lost inside blocks of 16, requests of 1,000 tokens, a queue waiting",
        "fragmentation-zen4-2core",
        "fragmentation.py",
        lambda r: share(
            select(r["load"], allocator="free_list", prefix_cache=True, mean_tokens=983)[
                "internal_fragmentation"
            ],
            2,
        ),
    ),
    Row(
        "external fragmentation of free blocks, same load without prefix caching (with it, no block is free)",
        "fragmentation-zen4-2core",
        "fragmentation.py",
        lambda r: share(
            select(r["load"], allocator="free_list", prefix_cache=False, mean_tokens=983)[
                "external_fragmentation"
            ]
        ),
    ),
    Row(
        "peak memory beyond weights and KV, 512 blocks",
        "memory-zen4-2core",
        "memory.py MODEL",
        lambda r: f"{r['overhead_mib']:.0f} MiB",
    ),
    Row(
        "KL from float32, mean of 512 positions: `int8` (bf16 itself)",
        "quantization-zen4-2core",
        "quantization.py MODEL",
        lambda r: f"{r['int8']['kl_nats']:.4f} ({r['bfloat16']['kl_nats']:.4f}) nats",
    ),
    Row(
        "through HTTP ÷ the engine alone, 32 streams, output tokens/s",
        "serving-zen4-2core",
        "serving.py MODEL",
        lambda r: times(r["http_share"]),
    ),
    Row(
        "CPU time of the HTTP process per streamed token, 100 streams",
        "serving-zen4-2core",
        "serving.py MODEL",
        lambda r: micros(r["front_cpu_us_per_streamed_token"], 0),
    ),
    Row(
        "time from a client's cut of its stream until no block is in use, 1,004 cuts",
        "stream-cuts-zen4-2core",
        "stream_cuts.py",
        lambda r: f"{r['free_after_ms']['median']:.0f} ms (longest {r['longest_ms']:.0f} ms)",
    ),
    Row(
        "lookup of a cached prompt of 32,768 tokens, packed",
        "kv-micro-amx-2core",
        "kv_micro.py",
        beside_peers("match", 32768),
    ),
    Row(
        "eviction of one block, 100,000 leaves of one block",
        "kv-micro-amx-2core",
        "kv_micro.py",
        beside_peers("evict 1", 100000),
    ),
    Row(
        "eviction of 512 blocks, 8,000 leaves of one block",
        "kv-micro-amx-2core",
        "kv_micro.py",
        beside_peers("evict 512", 8000),
    ),
    Row(
        "request of 64 tokens, embedded model, beside 0, 1 and 3 busy processes ÷ all threads alone",
        "neighbours-amx-2core",
        "neighbours.py",
        beside_neighbours,
    ),
    Row(
        "prefill of 512 tokens in bf16 ÷ in float32, AVX2 imitated",
        "widened-prefill-avx2-imitated-2core",
        "widened_prefill.py MODEL",
        lambda r: f"{prefill_s(r, 'bfloat16') / prefill_s(r, 'float32'):.2f}×",
    ),
    Row(
        "eviction per block, 16 at a time, 100,000 leaves of 4 blocks",
        "eviction-cost-leaves-of-4-amx-2core",
        "eviction_cost.py --leaf-blocks 4",
        eviction_costs,
    ),
    Row(
        "prompt tokens saved by the default policy (LRU), Mooncake trace, by capacity in blocks",
        "eviction",
        "eviction.py TRACE",
        saving,
    ),
    Row(
        "prompt tokens saved ÷ all that an earlier prompt began with, multi-turn, 10,000 blocks",
        "reference-experiment",
        "reference_experiment.py",
        lambda r: share(select(r["traces"]["multi_turn"], run="ours", capacity=10000)["share_of_ideal"], 1),
    ),
    Row(
        "TTFT of 2,048 tokens with the KV of 1,920 in a tier ÷ TTFT of computing all",
        "tier-prefill-zen4-2core",
        "tier_prefill.py MODEL",
        fetched_share,
    ),
    Row(
        "compaction while 4 requests decode: external fragmentation; ITL p99 with ÷ without",
        "compaction-zen4-2core",
        "compaction.py MODEL",
        compaction,
    ),
]


def table(folder: Path = RESULTS) -> str:
    """Return the whole part of the README, a table for each machine that a result was taken on."""
    by_machine: dict[str, list[str]] = {}
    for row in ROWS:
        result = json.loads((folder / f"{row.result}.json").read_text(encoding="utf-8"))
        line = f"| {row.what} | {row.figure(result)} | `{row.command}` |"
        by_machine.setdefault(machine(result["machine"]), []).append(line)
    head = "| what | median (min) | command, in `benchmarks/` |\n|---|---|---|\n"
    return "\n".join(f"{name}:\n\n{head}" + "\n".join(lines) + "\n" for name, lines in by_machine.items())


ENGINES = {"sagellm": "sageLLM", "vllm": "vLLM", "llamacpp": "llama.cpp", "transformers": "transformers"}
FORMATS = {"bf16": "bf16", "int8": "int8", "int8-kv8": "int8, 8-bit KV", "int4": "int4"}
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "one request": lambda figures: figures["decode_tokens_per_s"]["median"],
    "32 requests": lambda figures: figures["batch_32_tokens_per_s"]["median"],
    "prompt of 512": lambda figures: 512 / figures["ttft_512_s"]["median"],
}
CPUS = {"amx": "Intel, AMX", "avx512": "AMD Zen 4, AVX-512", "avx2": "AMD Zen 3, AVX2"}


def forward_table(folder: Path = RESULTS) -> str:
    """Return tokens per second beside the peers, by kind of CPU; empty until a result is kept."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("forward-*.json")))
    results = sorted(found, key=lambda result: [*CPUS, result["kind"]].index(result["kind"]))
    if not results:
        return ""
    lines = [
        "Tokens per second of a Qwen3-0.6B shape (random weights), one engine after the other on the same "
        "machine:\n",
        f"| CPU | weights | load | {' | '.join(ENGINES.values())} |",
        "|---|---|---|" + "---|" * len(ENGINES),
    ]
    for result in results:
        lines += _forward_rows(result)
    notes = [
        f"{CPUS.get(result['kind'], result['kind'])}: {machine(result['machine'])}, reads {_reads(result)}; "
        f"`python benchmarks/{result['command']}`"
        for result in results
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _forward_rows(result: dict[str, Any]) -> list[str]:
    """Return a line for each format and load that was measured, the fastest engine in bold."""
    by_run = {(run["engine"], run["format"]): run["figures"] for run in result["runs"]}
    rows = []
    for number_format, shown in FORMATS.items():
        for load, read in MEASURES.items():
            values = {}
            for engine in ENGINES:
                with suppress(KeyError):
                    values[engine] = read(by_run[engine, number_format])
            if not values:
                continue
            best = max(values, key=lambda engine: values[engine])
            cells = [_rate(values.get(engine), is_best=engine == best) for engine in ENGINES]
            cpu = CPUS.get(result["kind"], result["kind"])
            rows.append(f"| {cpu} | {shown} | {load} | {' | '.join(cells)} |")
    return rows


def _rate(value: float | None, *, is_best: bool) -> str:
    if value is None:
        return "–"
    text = f"{value:.1f}" if value < 100 else f"{value:,.0f}"
    return f"**{text}**" if is_best else text


def _reads(result: dict[str, Any]) -> str:
    rates = [one["read_gbytes_per_s"] for run in result["runs"] for one in run["limits"]]
    return f"{min(rates):.0f}–{max(rates):.0f} GB/s"


def machine(described: dict[str, Any]) -> str:
    """Name the machine of a result in a few words."""
    flags = described["flags"]
    widest = next(
        (name for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX-512 with bf16")) if flag in flags),
        "AVX2",
    )
    return f"{described['cpus']} cores of {described['cpu']} ({widest}), torch {described['torch']}"


def _replaced(text: str, begin: str, end: str, what: str) -> str:
    return text[: text.index(begin) + len(begin)] + what + text[text.index(end) :]


def main() -> None:
    """Write the tables, or compare them with what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 unless README.md agrees")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    written = _replaced(text, BEGIN, END, "\n" + table() + "\n")
    written = _replaced(written, FORWARD_BEGIN, FORWARD_END, forward_table())
    if not options.check:
        README.write_text(written, encoding="utf-8")
    elif written != text:
        sys.exit("README.md differs from benchmarks/results; run python benchmarks/readme_table.py")


if __name__ == "__main__":
    main()
