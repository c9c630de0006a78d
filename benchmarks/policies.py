"""What scheduler passes gain over first come, first served: `python benchmarks/policies.py`, on virtual time.

Everything that schedules and keeps KV is what serves; steps take what `--cost` says (by default a stated
roofline, `cost/h200-8b.json`), and the host takes no time. Every pipeline runs with predictors that know
nothing (`null`), that are installed, and that know each length (`exact`): a gain that `null` has as well is
not one of prediction.

1. `loads`: FCFS and the default pipeline on the loads of `serving_loads.py`, with two seeds each, at 0.7, 0.9
   and 1.1 of what FCFS carries, and in a closed loop (a fixed number of clients that think between answers);
   and on traces, with `--traces DIR`. What FCFS carries is the rate at which requests end while all of
   them wait at once, from a quarter of the time until the last one starts.
2. `predictors`: mean latency with each predictor that learns while it serves, as a share of the gain of
   knowing lengths over knowing nothing, with few seats and many: on Azure's conversations with prompts of at
   most 512 tokens, and on recorded chats with text. Predictors have learnt from the first 70 % of a trace,
   and the rest is served, without shares of tenants: each chat's client is one.
3. `priority`: one request in ten, of at most 2,048 tokens, is urgent, at 0.9 of the load.
4. `blocks`: re-prefill with 1,000 … 20,000 blocks, beside what a cache alone computes again under LRU and
   Belady's policy (`sage llm simulate --cache-only`).
5. `targets`: the time that a step may take, 50 ms here, decides how much of `max_num_batched_tokens` it
   uses. FCFS and the default pipeline at 0.9 of the load with longer steps too.

3 to 5 need Mooncake's `conversation_trace.jsonl` (https://github.com/kvcache-ai/Mooncake, Apache-2.0) in
`--traces`, plain or compressed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from common import output_flags, publish
from serving_loads import LOADS

from sagellm.core import LifetimePredictorProtocol, PluginRegistry, TraceRequest
from sagellm.engines import EngineConfig
from sagellm.engines.cli.output import columns
from sagellm.engines.progress import progress_bar
from sagellm.lab.simulation.oracle import OraclePredictor
from sagellm.lab.simulation.predictions import predictions
from sagellm.lab.simulation.runs import simulate as replay_cache
from sagellm.lab.simulation.served_load import LoadSettings, ServedRequest, output_lens
from sagellm.lab.simulation.serving import ServingRun, simulate_serving, with_passes
from sagellm.lab.simulation.serving_figures import Tail
from sagellm.lab.simulation.step_costs import read_step_costs
from sagellm.lab.traces import read_trace

COST = Path(__file__).parent / "cost" / "h200-8b.json"
AZURE = Path(__file__).parent / "traces" / "azure_conv.csv.xz"
CHAT = Path(__file__).parent / "traces" / "embedded_chat.jsonl.xz"
MOONCAKE = ("mooncake_conversation.jsonl.xz", "conversation_trace.jsonl")

FCFS = "order=none,share=none,preempt=none"
"""First come, first served, with prompts cut as always; without priorities the engine's own order."""

DEFAULT = ""
WITHOUT_ORDER = "order=none"
ALONE = "share=none"
PATIENT = "order=shortest{patience=10},share=none"
"""Lets long requests wait ten times as long for short ones."""

SIZES = {"chat": 1000, "long outputs": 700, "bursts": 600, "tenants": 600}
"""Requests of a load; others have 400."""

SHARES = (0.7, 0.9, 1.1)
MAIN_SHARE = 0.9
THINK_S = 20.0
SHORT = 512
LEARNT_SHARE = 0.7
FEW_SEATS = 8
PREDICTOR_LOADS = (0.9, 1.1)
URGENT = "order=priority{ageing_s=120}"
URGENT_SHARE, URGENT_TOKENS = 0.1, 2048
BLOCKS = (1000, 5000, 10_000, 20_000)
TARGETS_MS = (50, 75, 100, 200)

NOTHING, EXACT = "null", "exact"
LEARNING = ("statistical", "ranker")
"""Predictors that learn while they serve; `online` corrects one of them."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where requests come from: a load and its seed, or the first ones of a trace."""

    name: str
    seed: int = 0
    limit: int | None = None
    trace: Path | None = None
    max_prompt: int | None = None  # longer prompts are left out
    share_learnt: float = (
        0.0  # of the requests: predictors have learnt from the first ones, others are served
    )

    @property
    def label(self) -> str:
        """The name, with the seed of a load."""
        return self.name if self.trace else f"{self.name} {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One simulated run. `share_urgent` of the requests are urgent; `is_told`: the engine knows."""

    source: Source
    cost: Path
    passes: str = FCFS
    predictor: str = NOTHING
    load: LoadSettings = field(default_factory=LoadSettings)
    num_seats: int | None = None  # None: the default
    num_blocks: int | None = None
    target_ms: float | None = None  # None: the default
    share_urgent: float = 0.0
    is_told: bool = True


@cache
def requests_of(source: Source) -> list[TraceRequest]:
    """Return a run's requests, on a clock that starts with the first."""
    if source.trace is None:
        return LOADS[source.name](source.seed, source.limit or SIZES.get(source.name, 400))
    found = recorded(source)
    kept = found[round(source.share_learnt * len(found)) :][: source.limit]
    return [replace(one, arrival_s=one.arrival_s - kept[0].arrival_s) for one in kept]


@cache
def recorded(source: Source) -> list[TraceRequest]:
    """Return the requests of a trace that count, by arrival."""
    assert source.trace is not None, "a load is generated"
    is_whole = source.max_prompt is not None or source.share_learnt
    found = read_trace(source.trace, limit=None if is_whole else source.limit)
    most = source.max_prompt
    kept = [one for one in found if most is None or one.num_prompt_tokens <= most]
    return sorted(kept, key=lambda one: one.arrival_s)


def experienced(name: str, source: Source) -> LifetimePredictorProtocol:
    """Return a predictor that has seen the requests before those that are served, and how they ended."""
    predictor: LifetimePredictorProtocol = PluginRegistry.load().make("lifetime_predictor", name)
    found = recorded(source)
    for _ in predictions(predictor, found[: round(source.share_learnt * len(found))]):
        pass
    return predictor


def urgent_places(requests: Sequence[TraceRequest], share: float) -> set[int]:
    """Choose so many requests with short prompts; the same ones each time."""
    short = [place for place, one in enumerate(requests) if one.num_prompt_tokens <= URGENT_TOKENS]
    return set(Random("urgent").sample(short, min(len(short), round(share * len(requests)))))


def simulate(job: Job) -> ServingRun:
    """Simulate one run."""
    requests = requests_of(job.source)
    values: dict[str, Any] = {
        "kv.block_size": requests[0].block_tokens or 16,
        "kv.num_blocks": job.num_blocks,
        "predictor.name": NOTHING if job.predictor == EXACT else job.predictor,
    }
    if job.target_ms is not None:
        values["scheduler.step_target_ms"] = job.target_ms
    if job.num_seats is not None:
        values["scheduler.max_num_seqs"] = job.num_seats
    config = EngineConfig().with_values(values)
    if job.passes != DEFAULT:
        config = with_passes(config, job.passes)
    predictor: LifetimePredictorProtocol | None = None
    if job.predictor == EXACT:
        predictor = OraclePredictor(output_lens(requests))
    elif job.source.share_learnt:
        predictor = experienced(job.predictor, job.source)
    if job.share_urgent and job.is_told:
        urgent = urgent_places(requests, job.share_urgent)
        requests = [replace(one, priority=int(place in urgent)) for place, one in enumerate(requests)]
    return simulate_serving(requests, config, read_step_costs(job.cost), load=job.load, predictor=predictor)


def run(job: Job) -> dict[str, Any]:
    """Simulate one run and return its figures."""
    done = simulate(job)
    figures = asdict(done.figures)
    figures.pop("by_tenant")
    figures.pop("by_priority")
    scheduler = done.scheduler
    found = {
        "load": job.source.label,
        "passes": ",".join(spec.text for spec in done.config.scheduler.pipeline) or "none",
        "predictor": job.predictor,
        "stretch": job.load.stretch,
        "num_clients": job.load.num_clients,
        "num_blocks": done.config.kv.num_blocks,
        **figures,
        "mean_latency_s": fmean(_latency_s(one) for one in done.requests if one.error is None),
        "decisions": {} if scheduler is None else {one.name: one.num_decisions for one in scheduler.passes},
    }
    if job.share_urgent:
        urgent = urgent_places(requests_of(job.source), job.share_urgent)
        own = [one for place, one in enumerate(done.requests) if place in urgent]
        waited = Tail.of([(one.scheduled_ns - one.arrival_ns) / 1e9 for one in own if one.scheduled_ns])
        found |= {"num_urgent": len(own), "urgent_queueing_s": None if waited is None else asdict(waited)}
    return found


def _latency_s(one: ServedRequest) -> float:
    assert one.finished_ns is not None, "it did not fail"
    return (one.finished_ns - one.arrival_ns) / 1e9


@cache
def capacity_of(source: Source, cost: Path, num_seats: int | None = None) -> float:
    """Return the requests/s that end under FCFS while all wait, but for the first quarter of that time."""
    load = LoadSettings(stretch=1e-6)
    done = simulate(Job(source=source, cost=cost, load=load, num_seats=num_seats)).requests
    last_ns = max(one.scheduled_ns or 0 for one in done)
    first_ns = last_ns / 4
    num_ended = sum(first_ns < (one.finished_ns or 0) <= last_ns for one in done)
    return num_ended / (last_ns - first_ns) * 1e9


def open_load(source: Source, capacity: float, share: float) -> LoadSettings:
    """Stretch arrivals to a share of what FCFS carries."""
    requests = requests_of(source)
    rate = len(requests) / (requests[-1].arrival_s - requests[0].arrival_s)
    return LoadSettings(stretch=rate / (share * capacity))


# --- the default on many loads

Rows = list[dict[str, Any]]


def judge_loads(options: argparse.Namespace) -> Rows:
    """Run FCFS and the pipelines on each load; each row has its FCFS run beside it."""
    sources = [
        Source(name=name, seed=seed, limit=options.limit)
        for name in options.loads
        for seed in range(1, options.seeds + 1)
    ]
    sources += [
        Source(name=path.name.split(".")[0], trace=path, limit=options.limit or 1000)
        for path in options.found
    ]
    if AZURE.name not in {path.name for path in options.found}:
        sources.append(Source(name="azure_conv", trace=AZURE, limit=options.limit or 1000))
    rows: Rows = []
    num_runs = 1 + len(options.pipelines) * len(options.predictors)
    total = len(sources) * (len(SHARES) + 1) * num_runs
    with progress_bar("simulating", total=total, unit="runs") as advance:
        for source in sources:
            for cell in judge_load(source, options):
                rows += cell
                advance(num_runs)
    return rows


def judge_load(source: Source, options: argparse.Namespace) -> Iterator[Rows]:
    """Yield the rows of each share of what FCFS carries, and those of the closed loop."""
    capacity = capacity_of(source, options.cost)
    latency_s = 0.0
    for share in SHARES:
        load = open_load(source, capacity, share)
        cell = judge_cell(source, load, {"loop": "open", "share": share, "capacity": capacity}, options)
        latency_s = latency_s or cell[0]["mean_latency_s"]
        yield cell
    num_clients = max(1, round(MAIN_SHARE * capacity * (THINK_S + latency_s)))
    load = LoadSettings(num_clients=num_clients, think_s=THINK_S)
    yield judge_cell(source, load, {"loop": "closed", "share": MAIN_SHARE, "capacity": capacity}, options)


def judge_cell(
    source: Source, load: LoadSettings, about: dict[str, Any], options: argparse.Namespace
) -> Rows:
    """Run all pipelines under one load; the first row is FCFS."""
    job = partial(Job, source=source, cost=options.cost, load=load)
    fcfs = run(job()) | {"is_candidate": False}
    rows = [fcfs]
    for passes in (WITHOUT_ORDER,) * (source.name == "tenants") + tuple(options.pipelines):
        for predictor in options.predictors if passes != WITHOUT_ORDER else [NOTHING]:
            rows.append(
                run(job(passes=passes, predictor=predictor)) | {"is_candidate": passes != WITHOUT_ORDER}
            )
    return [one | about | {"beside_fcfs": beside(fcfs, one)} for one in rows]


def beside(fcfs: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """Return ratios to FCFS, but of the longest wait the difference in seconds.

    `all_in_time` is the goodput if every request that FCFS ends were in time.
    """
    return {
        "all_in_time": fcfs["request_throughput_per_s"] / max(fcfs["goodput_requests_per_s"], 1e-9),
        "goodput": one["goodput_requests_per_s"] / max(fcfs["goodput_requests_per_s"], 1e-9),
        "mean_ttft": one["ttft_s"]["mean"] / fcfs["ttft_s"]["mean"],
        "p99_ttft": one["ttft_s"]["p99"] / fcfs["ttft_s"]["p99"],
        "mean_latency": one["mean_latency_s"] / fcfs["mean_latency_s"],
        "longest_wait_s": one["queueing_s"]["max"] - fcfs["queueing_s"]["max"],
    }


def broken_bars(rows: Rows, starvation_s: float) -> list[str]:
    """Say where the default is worse than FCFS by more than it may be."""
    told = []
    for one in rows:
        found = one["beside_fcfs"]
        is_broken = {
            f"goodput {found['goodput']:.3f}": found["goodput"] < 0.98,
            f"mean TTFT {found['mean_ttft']:.3f}": found["mean_ttft"] > 1.02,
            f"P99 TTFT {found['p99_ttft']:.3f}": one["share"] <= MAIN_SHARE and found["p99_ttft"] > 1.25,
            f"longest wait {found['longest_wait_s']:+.1f} s": found["longest_wait_s"] > starvation_s,
        }
        told += [f"{_name(one)}: {text} of FCFS's" for text, broken in is_broken.items() if broken]
    return told


def _name(one: dict[str, Any]) -> str:
    return f"{one['load']}, {one['loop']} {one['share']}, {one['passes']}, {one['predictor']}"


# --- what predictions are worth


def judge_predictors(options: argparse.Namespace) -> Rows:
    """Compare predictors where outputs take most of the time, and where prompts do."""
    served: dict[str, Any] = {"limit": options.limit, "share_learnt": LEARNT_SHARE}
    azure = Source(name="azure_conv", trace=AZURE, max_prompt=SHORT, **served)
    chat = Source(name="embedded_chat", trace=CHAT, **served)
    cells = list(product((azure, chat), (FEW_SEATS, None), PREDICTOR_LOADS, (ALONE, PATIENT)))
    found: Rows = []
    with progress_bar("simulating", total=len(cells), unit="cells") as advance:
        for source, num_seats, share, passes in cells:
            load = open_load(source, capacity_of(source, options.cost, num_seats), share)
            job = Job(source=source, cost=options.cost, load=load, passes=passes, num_seats=num_seats)
            fcfs = run(replace(job, passes=FCFS))
            runs = [run(replace(job, predictor=name)) for name in (NOTHING, *LEARNING, EXACT)]
            nothing, exact = (runs[place]["mean_latency_s"] for place in (0, -1))
            for one in runs:
                gain = (nothing - one["mean_latency_s"]) / (nothing - exact) if nothing > exact else None
                found.append(
                    one | {"share": share, "gain": gain, "num_seats": num_seats, "in_order_of_arrival": fcfs}
                )
            advance(1)
    return found


# --- parts on one trace


def prioritise(job: Callable[..., Job]) -> dict[str, Any]:
    """Compare the delay of urgent requests where the engine does not know them, and where it does."""
    told = {"fcfs": (FCFS, False), "priorities alone": (FCFS, True), "default": (DEFAULT, True)}
    told["order=priority"] = (URGENT, True)
    return {
        name: run(job(passes=passes, is_told=is_told, share_urgent=URGENT_SHARE))
        for name, (passes, is_told) in told.items()
    }


def vary_blocks(job: Callable[..., Job]) -> list[dict[str, Any]]:
    """Compare what is computed again at several capacities with what a cache alone would."""
    requests = requests_of(job().source)
    config = EngineConfig().with_values({"kv.block_size": requests[0].block_tokens or 16})
    alone = replay_cache(
        requests, config, capacities=BLOCKS, policies=["lru", "belady"], advance=lambda amount: None
    )
    rates = {(one.eviction_policy, one.capacity): one.figures.re_prefill_rate for one in alone.runs}
    found = []
    for num_blocks in BLOCKS:
        one = run(job(passes=DEFAULT, num_blocks=num_blocks))
        found.append(
            {
                "num_blocks": num_blocks,
                "re_prefill_rate": one["re_prefill_rate"],
                "lru_re_prefill_rate": rates["lru", num_blocks],
                "belady_re_prefill_rate": rates["belady", num_blocks],
                "run": one,
            }
        )
    return found


def vary_targets(job: Callable[..., Job]) -> list[dict[str, Any]]:
    """Show what longer steps do to both pipelines."""
    return [
        {"target_ms": target_ms, "run": run(job(passes=passes, target_ms=target_ms))}
        for target_ms in TARGETS_MS
        for passes in (FCFS, DEFAULT)
    ]


# --- text

_HEAD = (
    "LOAD", "LOOP", "PIPELINE", "PREDICTOR", "GOODPUT/S", "TTFT MEAN", "P99", "LONGEST WAIT", "LATENCY MEAN",
    "JAIN",
)  # fmt: skip


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    found = one["beside_fcfs"]
    is_fcfs = not one["is_candidate"] and one["passes"] == "chunked-prefill"
    jain = one["jains_index"]
    return (
        one["load"],
        f"{one['loop']} {one['share']}",
        "FCFS" if is_fcfs else one["passes"],
        "" if is_fcfs else one["predictor"],
        f"{one['goodput_requests_per_s']:.3f}" + _gain(found["goodput"], is_fcfs=is_fcfs),
        f"{one['ttft_s']['mean']:.2f} s" + _gain(found["mean_ttft"], is_fcfs=is_fcfs),
        f"{one['ttft_s']['p99']:.2f} s" + _gain(found["p99_ttft"], is_fcfs=is_fcfs),
        f"{one['queueing_s']['max']:.1f} s",
        f"{one['mean_latency_s']:.2f} s" + _gain(found["mean_latency"], is_fcfs=is_fcfs),
        "-" if jain is None else f"{jain:.3f}",
    )


def _gain(ratio: float, *, is_fcfs: bool) -> str:
    return "" if is_fcfs else f" ({ratio - 1:+.0%})"


def loads_text(rows: Rows, broken: Sequence[str]) -> str:
    """Show every run, what predictions add to it, and which bars it breaks."""
    parts = [columns(_HEAD, [_row(one) for one in rows])]
    parts += summary(rows)
    parts.append("\n".join(broken) or "every bar holds")
    return "\n\n".join(parts)


def summary(rows: Rows) -> list[str]:
    """Say what each pipeline gains in the mean over loads at the main share, and what there is to gain."""
    lines = []
    for (passes, predictor, loop), cells in _by_pipeline(rows).items():
        main = [one["beside_fcfs"] for one in cells if one["share"] == MAIN_SHARE]
        mean = {name: fmean(one[name] for one in main) - 1 for name in main[0]}
        lines.append(
            f"{passes}, {predictor}, {loop} at {MAIN_SHARE}: goodput {mean['goodput']:+.1%} of at most "
            f"{mean['all_in_time']:+.1%}, mean TTFT {mean['mean_ttft']:+.1%}, mean latency "
            f"{mean['mean_latency']:+.1%} in the mean of {len(main)} runs"
        )
    return lines


def _by_pipeline(rows: Rows) -> dict[tuple[str, str, str], Rows]:
    found: dict[tuple[str, str, str], Rows] = {}
    for one in rows:
        if one["is_candidate"]:
            found.setdefault((one["passes"], one["predictor"], one["loop"]), []).append(one)
    return found


def predictors_text(rows: Rows) -> str:
    """Show mean latencies, and shares of the exact lengths' gain over knowing nothing."""
    shown = [
        (
            one["load"],
            str(one["num_seats"] or "default"),
            str(one["share"]),
            one["passes"].partition(",")[0],
            one["predictor"],
            f"{one['mean_latency_s']:.3f} s",
            f"{one['mean_latency_s'] / one['in_order_of_arrival']['mean_latency_s'] - 1:+.1%}",
            "-" if one["gain"] is None else f"{one['gain']:.0%}",
            f"{one['goodput_requests_per_s']:.2f}",
        )
        for one in rows
    ]
    head = (
        "TRACE",
        "SEATS",
        "LOAD",
        "ORDER",
        "PREDICTOR",
        "LATENCY MEAN",
        "BESIDE FCFS",
        "OF THE EXACT ONE'S GAIN",
        "GOODPUT/S",
    )
    return columns(head, shown)


def trace_text(found: dict[str, Any]) -> list[str]:
    """Show the urgent requests, the blocks and the targets."""
    parts = []
    for name, one in found.get("priority", {}).items():
        tail = one["urgent_queueing_s"]
        parts.append(
            f"{name}: {one['num_urgent']} urgent requests waited {tail['mean']:.3f} s, "
            f"P99 {tail['p99']:.3f} s; the longest wait of all is {one['queueing_s']['max']:.1f} s"
        )
    if blocks := found.get("blocks"):
        names = ("re_prefill_rate", "lru_re_prefill_rate", "belady_re_prefill_rate")
        rows = [(f"{one['num_blocks']:,}", *(f"{one[name]:.1%}" for name in names)) for one in blocks]
        parts.append(columns(("BLOCKS", "RE-PREFILL", "LRU, CACHE ALONE", "BELADY, CACHE ALONE"), rows))
    if targets := found.get("targets"):
        rows = [
            (
                f"{one['target_ms']:g} ms",
                one["run"]["passes"],
                f"{one['run']['batching_efficiency']:.1%}",
                f"{one['run']['goodput_requests_per_s']:.3f}",
                f"{one['run']['ttft_s']['mean']:.2f} s",
                f"{1e3 * one['run']['tpot_s']['mean']:.1f} ms",
            )
            for one in targets
        ]
        head = ("STEP TARGET", "PIPELINE", "BATCHING", "GOODPUT/S", "TTFT MEAN", "TPOT MEAN")
        parts.append(columns(head, rows))
    return parts


# --- command line

PARTS = ("loads", "predictors", "priority", "blocks", "targets")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--traces", type=Path, help="folder of recorded traces")
    parser.add_argument("--cost", type=Path, default=COST)
    parser.add_argument("--loads", nargs="*", choices=[*LOADS], default=list(LOADS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--limit", type=int, help="requests of each load or trace")
    parser.add_argument("--compare", nargs="+", default=[], metavar="PASSES", help="other pipelines")
    parser.add_argument("--predictors", nargs="+", default=[NOTHING, "statistical", EXACT])
    output_flags(parser, "policies-h200-8b")
    options = parser.parse_args()
    options.pipelines = [DEFAULT, *options.compare]
    options.found = sorted(
        path
        for path in (options.traces.iterdir() if options.traces else ())
        if ".json" in path.name or ".csv" in path.name
    )
    return options


def main() -> None:
    """Simulate and print."""
    options = parse()
    found: dict[str, Any] = {"cost": read_step_costs(options.cost).source, "limit": options.limit}
    parts = []
    if "loads" in options.parts:
        rows = judge_loads(options)
        order = EngineConfig().scheduler.order
        starvation_s = 0.0
        if order is not None:
            made: Any = PluginRegistry.load().resolve("scheduler_pass", order.name)
            starvation_s = made(**order.options).starvation_s
        default = ",".join(spec.text for spec in EngineConfig().scheduler.pipeline)
        judged = [one for one in rows if one["passes"] == default]
        broken = broken_bars(judged, starvation_s)
        found |= {"default": default, "loads": rows, "broken_bars": broken}
        parts.append(loads_text(rows, broken))
    if "predictors" in options.parts:
        found["predictors"] = judge_predictors(options)
        parts.append(predictors_text(found["predictors"]))
    trace = next((path for path in options.found if path.name in MOONCAKE), None)
    if trace is not None:
        source = Source(name="mooncake", trace=trace, limit=options.limit or 3000)
        load = open_load(source, capacity_of(source, options.cost), MAIN_SHARE)
        job = partial(Job, source=source, cost=options.cost, load=load)
        kinds: dict[str, Callable[..., Any]] = {
            "priority": prioritise, "blocks": vary_blocks, "targets": vary_targets
        }  # fmt: skip
        found |= {name: measure(job) for name, measure in kinds.items() if name in options.parts}
        parts += trace_text(found)
    publish("policies", "\n\n".join(parts), options, **found)


if __name__ == "__main__":
    main()
