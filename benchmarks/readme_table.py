"""Writes the tables of README.md and docs/ from kept results; a test checks that they agree.

python benchmarks/readme_table.py            # writes all
python benchmarks/readme_table.py --check    # exits 1 if one of them differs from what it would write
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PERFORMANCE, BENCHMARKING = ROOT / "docs" / "performance.md", ROOT / "docs" / "benchmarking.md"


@dataclass(frozen=True)
class Row:
    """One line of the table: `figure` turns the kept result into text."""

    what: str
    result: str
    command: str
    figure: Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class Target:
    """One line of the table of targets; `figure` gets the kept results in this order."""

    what: str
    results: tuple[str, ...]
    commands: str  # several are separated by commas
    figure: Callable[..., str]


MIXED = ("mixed-embedded-amx-2core", "mixed-0.6b-bf16-amx-2core")
BENCHMARK = (
    "sage llm benchmark --enable-prefix-cache --enable-predictive-eviction --scheduler-ir base "
    "--duration 300 --workload mixed --num-blocks 2000 --model MODEL --peer vllm=PYTHON"
)
KV_MICRO, POLICIES = "kv-micro-amx-2core", "policies-h200-8b"
ON_MOONCAKE = "policies-mooncake-h200-8b"


def kept(folder: Path, name: str) -> dict[str, Any]:
    """Read a kept result."""
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return result


def times(figures: dict[str, Any]) -> str:
    """Format a ratio: median (min)."""
    return f"{figures['median']:.2f}× ({figures['min']:.2f}×)"


def micros(figures: dict[str, Any], digits: int = 1) -> str:
    """Format microseconds: median (min)."""
    return f"{figures['median']:,.{digits}f} µs ({figures['min']:,.{digits}f} µs)"


def share(value: float, digits: int = 0) -> str:
    """Format a share of one in percent."""
    return f"{100 * value:.{digits}f} %"


def gain(value: float) -> str:
    """Format a relative change in percent, with its sign."""
    return f"{100 * value:+.0f} %"


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
    return f"{shown} µs" if slowest == "reuse" else f"{shown}, `{slowest}` {costs[slowest]:.1f} µs"


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


def _hit_rate(reference: dict[str, Any], mixed: dict[str, Any]) -> str:
    ours, vllm, ideal = (
        select(reference["traces"]["multi_turn"], run=run, capacity=capacity)["token_hit_rate"]
        for run, capacity in (("ours", 10000), ("vllm", 10000), ("ideal", None))
    )
    figures = mixed["figures"]
    rates = (figures[f"saturated.{which}_hit_rate"] for which in ("token", "ideal"))
    served = [share(rate["sagellm"], 1) for rate in rates]
    return (
        f"100 requests of conversations: {share(ours, 1)}, all that can be found ({share(ideal, 1)}); "
        f"vLLM {share(vllm, 1)}<br/>mixed load, served: {served[0]} of {served[1]}; "
        f"vLLM {share(figures['saturated.token_hit_rate']['vllm'], 1)}"
    )


def _by_model(mixed: Sequence[dict[str, Any]]) -> Iterable[tuple[str, dict[str, dict[str, float]]]]:
    """Yield each model's figures under the mixed load beside its name."""
    return zip(("embedded model", "0.6B"), (result["figures"] for result in mixed), strict=True)


def _saved(result: dict[str, Any], *mixed: dict[str, Any]) -> str:
    lru, ours = (result["policies"][name] for name in ("lru", "reuse"))
    by_capacity = "<br/>".join(
        f"{a['capacity']:,} blocks {share(b['token_saving'], 1)} (LRU {share(a['token_saving'], 1)})"
        for a, b in zip(lru, ours, strict=True)
    )
    served = "<br/>".join(
        f"{name} {share(figures['saturated.token_saving']['sagellm'], 1)} where "
        f"{share(figures['saturated.ideal_hit_rate']['sagellm'], 1)} is possible; "
        f"vLLM {share(figures['saturated.token_hit_rate']['vllm'], 1)}"
        for name, figures in _by_model(mixed)
    )
    return (
        f"mixed load, served:<br/>{served}<br/>"
        f"Mooncake's conversations, where {share(result['unlimited'], 1)} is possible:<br/>{by_capacity}"
    )


def _by_size(call: str, *sizes: int) -> Callable[[dict[str, Any]], str]:
    def figure(result: dict[str, Any]) -> str:
        return "<br/>".join(f"{size:,} tokens {beside_peers(call, size)(result)}" for size in sizes)

    return figure


def _fragmentation(result: dict[str, Any]) -> str:
    cached, plain = (
        select(result["load"], allocator="free_list", prefix_cache=is_on, mean_tokens=983)
        for is_on in (True, False)
    )
    return (
        f"inside blocks of 16 {share(cached['internal_fragmentation'], 2)}<br/>of free blocks "
        f"{share(cached['external_fragmentation'], 1)}, without prefix caching "
        f"{share(plain['external_fragmentation'])} (blocks need not adjoin; compaction brings it to 0)"
    )


def _utilisation(capacity: dict[str, Any], *mixed: dict[str, Any]) -> str:
    held = ", ".join(
        f"{name} {share(figures['saturated.kv_held_share_under_pressure']['sagellm'])}"
        for name, figures in _by_model(mixed)
    )
    return (
        f"{share(capacity['utilisation_by_live_tokens']['median'])} of the KV in use holds live tokens<br/>"
        f"blocks that hold live or reusable KV from the first eviction on: {held}"
    )


def _re_prefill(result: dict[str, Any]) -> str:
    by_policy = (result["policies"][name] for name in ("reuse", "lru", "belady"))
    return "Mooncake's conversations:<br/>" + "<br/>".join(
        f"{ours['capacity']:,} blocks {share(ours['re_prefill_rate'], 1)} "
        f"(LRU {share(lru['re_prefill_rate'], 1)}, the optimum {share(best['re_prefill_rate'], 1)})"
        for ours, lru, best in zip(*by_policy, strict=True)
    )


def _fairness(cache: dict[str, Any], served: dict[str, Any]) -> str:
    index = {name: of["jains_index"] for name, of in cache["policies"].items()}
    return (
        f"blocks of the cache: `qos{{within=reuse}}` {index['qos, within: reuse']:.3f}, "
        f"default {index['reuse']:.2f}, LRU {index['lru']:.2f}<br/>"
        f"tokens served by weight, five tenants: {served['shares']['jains_index']:.3f}"
    )


def _schedule(result: dict[str, Any]) -> str:
    texts = []
    for running in (32, 256, 1024):
        row = select(result["rows"], running=running, waiting=1000, context=1024, tenants=1)
        ours, vllm = (row[name]["schedule_us"]["median"] for name in ("sagellm", "vllm"))
        texts.append(f"{running:,} running, 1,000 waiting {ours:.0f} µs; vLLM {vllm:,.0f}")
    return "<br/>".join(texts)


def _order_gain(result: dict[str, Any]) -> str:
    texts = []
    for share_of in (0.7, 0.9, 1.1):
        gains = {
            who: fmean(
                one["beside_fcfs"]["goodput"]
                for one in result["loads"]
                if (one["passes"], one["predictor"]) == (result["default"], who)
                and (one["loop"], one["share"]) == ("open", share_of)
            )
            - 1
            for who in ("null", "exact")
        }
        texts.append(f"at {share_of} of capacity {gain(gains['null'])}, lengths known {gain(gains['exact'])}")
    return f"requests in time, mean of all loads:<br/>{'<br/>'.join(texts)}"


def _batching(result: dict[str, Any]) -> str:
    chosen = [one for one in result["targets"] if "shortest" in one["run"]["passes"]]
    lowered = chosen[0]["run"]["lowered_batching_efficiency"]
    texts = (f"{one['target_ms']} ms {one['run']['batching_efficiency']:.2f}" for one in chosen)
    return (
        f"{lowered:.2f} of the budget that fits a step's target<br/>of the whole budget: {'; '.join(texts)}"
    )


def _urgent(policies: dict[str, Any], *mixed: dict[str, Any]) -> str:
    waits = {name: 1000 * of["urgent_queueing_s"]["p99"] for name, of in policies["priority"].items()}
    texts = [f"wait: `priority` {waits['order=priority']:,.0f} ms, in order of arrival {waits['fcfs']:,.0f}"]
    for name, figures in _by_model(mixed):
        ttft, whole = (figures[f"steady.high_priority_{what}_p99_ms"] for what in ("ttft", "e2e"))
        alone = figures["alone.high_priority_ttft_median_ms"]
        texts.append(
            f"{name}, served: first token {ttft['sagellm']:,.0f} ms, alone {alone['sagellm']:,.0f}; "
            f"vLLM {ttft['vllm']:,.0f}, alone {alone['vllm']:,.0f}; "
            f"whole answer {whole['sagellm']:,.0f}; vLLM {whole['vllm']:,.0f}"
        )
    return "<br/>".join(texts)


_CONTROLS = ("constant median", "median by prompt length", "best constant in hindsight")


def _by_load(
    key: str, show: Callable[[float], str], best: Callable[..., Any]
) -> Callable[[dict[str, Any]], str]:
    """Show a score of each load: of the best predictor, of the default one, and of the best control."""

    def figure(result: dict[str, Any]) -> str:
        texts = []
        for load, found in result["loads"].items():
            scores = {one["name"]: one[key] for one in found}
            learnt = best((name for name in scores if name not in _CONTROLS), key=scores.__getitem__)
            control = best(_CONTROLS, key=scores.__getitem__)
            shown = {
                f"`{learnt}`": scores[learnt],
                "`statistical`": scores["statistical"],
                control: scores[control],
            }
            texts.append(f"{load}: {'; '.join(f'{name} {show(value)}' for name, value in shown.items())}")
        return "<br/>".join(texts)

    return figure


def _ranked(result: dict[str, Any]) -> str:
    texts = []
    for load, found in result["loads"].items():
        scores = {one["name"]: one for one in found if one["name"] not in _CONTROLS}
        best = max(scores.values(), key=lambda one: one["rank_correlation"])
        covered = [one["coverage"] for one in scores.values()]
        texts.append(
            f"{load}: `{best['name']}` {best['rank_correlation']:.2f}, `statistical` "
            f"{scores['statistical']['rank_correlation']:.2f}; intervals hold {share(min(covered), 1)} to "
            f"{share(max(covered), 1)}"
        )
    return "<br/>".join(texts)


def _predict_us(result: dict[str, Any]) -> str:
    return "<br/>".join(
        f"`{name}` {micros(one['alone_us'])}, {micros(one['of_a_batch_us'])} of a batch of 256"
        for name, one in result["costs"].items()
    )


def _fidelity(result: dict[str, Any]) -> str:
    texts = []
    for name, one in result["loads"].items():
        ttfts = [1e3 * run["mean_ttft_s"] for run in one["runs"]]
        texts.append(
            f"{name}: a step {share(one['median_step_error'], 1)} off, all steps {gain(one['busy_error'])}, "
            f"mean TTFT {gain(one['ttft_error'])} ({1e3 * one['simulated_mean_ttft_s']:.0f} ms; "
            f"{len(ttfts)} real runs had {min(ttfts):.0f} to {max(ttfts):.0f})"
        )
    return "<br/>".join(texts)


def _beside_vllm(*mixed: dict[str, Any]) -> str:
    texts = []
    for name, figures in _by_model(mixed):
        rates = figures["saturated.output_throughput_tokens_per_s"]
        ours, vllm = rates["sagellm"], rates["vllm"]
        texts.append(f"{name}: {ours:,.1f} tokens/s; vLLM {vllm:,.1f} ({gain(ours / vllm - 1)})")
    return f"mixed load, output:<br/>{'<br/>'.join(texts)}"


def _batched(result: dict[str, Any]) -> str:
    (ours,) = (run for run in result["runs"] if (run["engine"], run["format"]) == ("sagellm", "bf16"))
    one, many = (ours["figures"][f"{key}_tokens_per_s"]["median"] for key in ("decode", "batch_16"))
    return f"16 requests at once {many:.0f} tokens/s, one {one:.1f}: {many / one:.1f}×"


TARGETS = [
    Target(
        "hit rate ≥ 60 % where the load allows it",
        ("reference-experiment", MIXED[0]),
        f"reference_experiment.py, {BENCHMARK}",
        _hit_rate,
    ),
    Target(
        "prompt tokens saved ≥ 30 %",
        ("eviction", *MIXED),
        f"eviction.py TRACE, {BENCHMARK}",
        _saved,
    ),
    Target(
        "lookup of a cached prompt < 10 µs", (KV_MICRO,), "kv_micro.py", _by_size("match", 512, 8192, 32768)
    ),
    Target("allocation < 20 µs", (KV_MICRO,), "kv_micro.py", _by_size("allocate", 512, 8192, 32768)),
    Target("fragmentation < 10 %", ("fragmentation-zen4-2core",), "fragmentation.py", _fragmentation),
    Target(
        "utilisation of KV memory ≥ 90 %",
        ("paged_capacity", *MIXED),
        f"paged_capacity.py, {BENCHMARK}",
        _utilisation,
    ),
    Target(
        "eviction decision < 100 µs",
        (KV_MICRO,),
        "kv_micro.py",
        lambda r: "one of 100,000 blocks " + beside_peers("evict 1", 100000)(r),
    ),
    Target("re-prefill < 20 %; whole system < 15 %", ("eviction",), "eviction.py TRACE", _re_prefill),
    Target(
        "fairness between tenants, Jain's index ≥ 0.8",
        ("fairness", "tenants-amx-2core"),
        "fairness.py TRACE, tenants.py",
        _fairness,
    ),
    Target("schedule of a step < 200 µs", ("host-step-amx-2core",), "host_step.py", _schedule),
    Target("throughput +20 % over the engine's own order", (POLICIES,), "policies.py", _order_gain),
    Target("batching efficiency ≥ 0.85", (ON_MOONCAKE,), "policies.py --traces DIR", _batching),
    Target(
        "P99 of urgent requests < 500 ms",
        (ON_MOONCAKE, *MIXED),
        f"policies.py --traces DIR, {BENCHMARK}",
        _urgent,
    ),
    Target(
        "MAE of predicted lengths < 10 tokens",
        ("lifetime",),
        "lifetime.py",
        _by_load("mae_tokens", "{:.1f}".format, min),
    ),
    Target(
        "predictions within 10 % for ≥ 70 %",
        ("lifetime",),
        "lifetime.py",
        _by_load("within_10_percent", share, max),
    ),
    Target("rank correlation; 80 % intervals hold 78–82 %", ("lifetime",), "lifetime.py", _ranked),
    Target(
        "prediction < 1 ms",
        ("lifetime",),
        "lifetime.py",
        _predict_us,
    ),
    Target(
        "throughput +25 % over vLLM",
        MIXED,
        BENCHMARK,
        _beside_vllm,
    ),
    Target(
        "simulated: steps ≤ 15 % off, TTFT under overload ≤ 8 %",
        ("fidelity-embedded",),
        "fidelity.py --cpu-time",
        _fidelity,
    ),
    Target("continuous batching × 3–5", ("forward-amx-2core",), "forward_peers.py MODEL", _batched),
    Target(
        "paged KV × 2–3 sequences in the same memory",
        ("paged_capacity",),
        "paged_capacity.py",
        lambda r: f"Azure's conversations, beside 4,096 tokens reserved each: {times(r['memory_use_gain'])}",
    ),
]


def target_table(folder: Path = RESULTS) -> str:
    """Return each target beside what is measured, its command and the kept results."""
    lines = ["| target | measured | command | kept |", "|---|---|---|---|"]
    for target in TARGETS:
        results = (kept(folder, name) for name in target.results)
        links = ", ".join(f"[{name}](../benchmarks/results/{name}.json)" for name in target.results)
        commands = ", ".join(f"`{command}`" for command in target.commands.split(", "))
        lines.append(f"| {target.what} | {target.figure(*results)} | {commands} | {links} |")
    return "\n".join(lines) + "\n"


def table(folder: Path = RESULTS) -> str:
    """Return what else is measured, a table for each machine that a result was taken on."""
    by_machine: dict[str, list[str]] = {}
    for row in ROWS:
        result = kept(folder, row.result)
        line = f"| {row.what} | {row.figure(result)} | `{row.command}` |"
        by_machine.setdefault(machine(result["machine"]), []).append(line)
    head = "| what | median (min) | command |\n|---|---|---|\n"
    tables = (f"{name}:\n\n{head}" + "\n".join(lines) + "\n" for name, lines in by_machine.items())
    return "\n" + "\n".join(tables) + "\n"


ENGINES = {
    **{"sagellm": "sageLLM", "vllm": "vLLM", "llamacpp": "llama.cpp", "openvino": "OpenVINO"},
    "transformers": "transformers",
}
FORMATS = {"bf16": "bf16", "int8": "int8", "int8-kv8": "int8, 8-bit KV", "int4": "int4"}
FORMATS |= {"w8a8": "W8A8", "w4a8": "W4A8", "w4a16": "W4A16"}
FORMATS |= {"gguf-q8_0": "GGUF Q8_0", "gguf-q4_0": "GGUF Q4_0", "gguf-q4_k_m": "GGUF Q4_K_M"}
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
    measured = {run["engine"] for result in results for run in result["runs"]}
    engines = [name for name in ENGINES if name in measured]
    lines = [
        "Tokens per second of a Qwen3-0.6B shape (random weights), one engine after the other on the same "
        "machine:\n",
        f"| CPU | weights | load | {' | '.join(ENGINES[name] for name in engines)} |",
        "|---|---|---|" + "---|" * len(engines),
    ]
    for result in results:
        lines += _forward_rows(result, engines)
    notes = [
        f"{CPUS.get(result['kind'], result['kind'])}: {machine(result['machine'])}, reads {_reads(result)}; "
        f"`python benchmarks/{result['command']}`"
        for result in results
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _forward_rows(result: dict[str, Any], engines: list[str]) -> list[str]:
    """Return a line for each format and load that was measured, the fastest engine in bold."""
    by_run = {(run["engine"], run["format"]): run["figures"] for run in result["runs"]}
    rows = []
    for number_format, shown in FORMATS.items():
        for load, read in MEASURES.items():
            values = {}
            for engine in engines:
                with suppress(KeyError):
                    values[engine] = read(by_run[engine, number_format])
            if not values:
                continue
            cells = _cells(values, engines)
            cpu = CPUS.get(result["kind"], result["kind"])
            rows.append(f"| {cpu} | {shown} | {load} | {' | '.join(cells)} |")
    return rows


def _cells(values: dict[str, float], engines: Iterable[str]) -> list[str]:
    """Format the engines' rates, the fastest in bold."""
    best = max(values, key=lambda engine: values[engine])
    return [_rate(values.get(engine), is_best=engine == best) for engine in engines]


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


SUMMARY = (
    ("bf16", "one request"),
    ("bf16", "32 requests"),
    ("bf16", "prompt of 512"),
    ("int8", "one request"),
)


def summary(folder: Path = RESULTS) -> str:
    """Return the four rows of the README, all of one machine."""
    result = kept(folder, "forward-amx-2core")
    by_run = {(run["engine"], run["format"]): run["figures"] for run in result["runs"]}
    names = [name for name in ENGINES if all((name, weights) in by_run for weights, _ in SUMMARY)]
    lines = [
        f"| weights | tokens per second | {' | '.join(ENGINES[name] for name in names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for weights, load in SUMMARY:
        values = {name: MEASURES[load](by_run[name, weights]) for name in names}
        lines.append(f"| {weights} | {load} | {' | '.join(_cells(values, names))} |")
    return "\n".join(lines) + "\n"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


SERVED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    (
        "output tokens per second, saturated",
        "saturated.output_throughput_tokens_per_s",
        _whole,
    ),
    (
        "P99 TTFT of high priority, steady (ms)",
        "steady.high_priority_ttft_p99_ms",
        _whole,
    ),
    ("TTFT of a high-priority prompt alone, median (ms)", "alone.high_priority_ttft_median_ms", _whole),
    ("P99 of a whole answer of high priority, steady (ms)", "steady.high_priority_e2e_p99_ms", _whole),
    ("TPOT, steady, median (ms)", "steady.tpot_median_ms", _whole),
    ("prompt tokens not computed, saturated", "saturated.token_saving", share),
    ("token hit rate, saturated", "saturated.token_hit_rate", share),
    ("… of a cache without limit, same prompts", "saturated.ideal_hit_rate", share),
    ("KV held under pressure, saturated", "saturated.kv_held_share_under_pressure", share),
    ("KV live, saturated", "saturated.kv_live_share", share),
    ("peak memory (GiB)", "saturated.peak_rss_mib", lambda mib: f"{mib / 1024:.1f}"),
)
"""Rows of the table of served loads: what, the figure's name, and how it is written."""


def served_table(folder: Path = RESULTS) -> str:
    """Return both models' figures under the mixed load, ours and vLLM's."""
    results = [kept(folder, name) for name in MIXED]
    columns = [(figures, server) for _, figures in _by_model(results) for server in ("sagellm", "vllm")]
    lines = ["| | embedded model: ours | vLLM | Qwen3-0.6B shape: ours | vLLM |", "|---|---|---|---|---|"]
    for what, name, show in SERVED:
        values = (figures[name].get(server) for figures, server in columns)
        lines.append(f"| {what} | {' | '.join('–' if one is None else show(one) for one in values)} |")
    rates = " and ".join(f"{result['rates']['steady']:.2g}" for result in results)
    lines += ["", f"Steady: {rates} requests/s. {machine(results[0]['machine'])}; `{BENCHMARK}`."]
    return "\n".join(lines) + "\n"


SECTIONS = {
    "summary": (README, summary),
    "served": (BENCHMARKING, served_table),
    "targets": (PERFORMANCE, target_table),
    "beside other engines": (PERFORMANCE, forward_table),
    "measured": (PERFORMANCE, table),
}


def section(text: str, name: str) -> tuple[int, int]:
    """Return where a section lies between its marks."""
    begin = f"<!-- {name}: written by benchmarks/readme_table.py -->\n"
    return text.index(begin) + len(begin), text.index(f"<!-- end of {name} -->")


def main() -> None:
    """Write the tables, or compare them with what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 unless all files agree")
    options = parser.parse_args()
    for file in (README, PERFORMANCE, BENCHMARKING):
        text = written = file.read_text(encoding="utf-8")
        for name, (place, make) in SECTIONS.items():
            if place == file:
                begin, end = section(written, name)
                written = written[:begin] + make() + written[end:]
        if not options.check:
            file.write_text(written, encoding="utf-8")
        elif written != text:
            sys.exit(f"{file.name} differs from benchmarks/results; run python benchmarks/readme_table.py")


if __name__ == "__main__":
    main()
