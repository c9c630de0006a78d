"""`benchmark`: a named load on an engine of ours, started for it, and on peers, one after the other.

First a few urgent requests, each alone, which shows the least that one waits. Then two phases: callers
without pauses, as many as given, which shows the throughput; and sessions that begin at a rate that every
server carries, which shows what urgent requests wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sagellm.core import ConfigError
from sagellm.lab.bench.contenders import Contender, PeerSpec, own_server, peer_server
from sagellm.lab.bench.contest import Contest, PhaseFigures
from sagellm.lab.bench.driver import LoadRun
from sagellm.lab.bench.figures import Limits, Spread
from sagellm.lab.bench.sessions import Phase
from sagellm.lab.bench.workloads import WorkloadSettings, mean_turns

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.engines.metrics.limits import Limits as MachineLimits
    from sagellm.server.remote.messages import Hello

STEADY_SHARE = 0.6
"""The rate of the second phase unless given: this share of what the slowest server reached in the first."""

ALONE, SATURATED, STEADY = "alone", "saturated", "steady"
_ANSWER_S = 60.0
_STEADY_SEED = 1000  # so that the second phase meets no prefix of the first


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """The load, and the servers that get it besides our own.

    With a `rate` (requests per second), only the second phase runs, for the whole duration; with
    `base_url` our own server is not started but stands there.
    """

    workload: str = "mixed"
    duration: float = 60.0
    concurrency: int = 32
    rate: float | None = None
    peers: tuple[PeerSpec, ...] = ()
    base_url: str | None = None
    max_len: int | None = None
    vocab_size: int | None = None
    priorities: bool = True
    seed: int = 0
    goodput: Limits | None = None

    def __post_init__(self) -> None:
        WorkloadSettings(name=self.workload)  # checks the name
        if not 0 < self.duration < float("inf"):
            raise ConfigError(f"duration is {self.duration}; it must be above 0 seconds")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate is {self.rate}; it must be above 0 requests per second")
        names = ["sagellm", *(peer.name for peer in self.peers)]
        if len(set(names)) < len(names):
            raise ConfigError(f"the servers are named {', '.join(names)}; give each a name of its own")

    def shown(self) -> dict[str, Any]:
        """Return what a result keeps."""
        return asdict(self) | {"peers": [peer.name for peer in self.peers]}


@dataclass(kw_only=True)
class BenchmarkRun:
    """What was measured: figures by phase and server, and the runs themselves."""

    figures: dict[str, dict[str, PhaseFigures]] = field(default_factory=dict)
    runs: dict[str, dict[str, LoadRun]] = field(default_factory=dict)
    alone_ttft_ms: dict[str, Spread | None] = field(default_factory=dict)  # by server
    rates: dict[str, float] = field(default_factory=dict)  # requests per second, by phase at a rate
    servers: dict[str, Contender] = field(default_factory=dict)
    machine: MachineLimits | None = None  # None where no engine of ours was started


def run_benchmark(
    config: EngineConfig,
    settings: BenchmarkSettings,
    *,
    measure: Callable[[EngineConfig], MachineLimits] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> BenchmarkRun:
    """Start the servers, apply the phases to each, and end what was started.

    Then `measure` is called with the configuration of our engine, as the engine resolved it, while nothing
    of ours runs; the shares of the machine's limits follow from it. `say` is told what begins. Raises
    BenchmarkError if a server does not start or answers nothing, ConfigError for settings that do not fit it.
    """
    done = BenchmarkRun()
    with _servers(config, settings, say) as (contenders, workload, engine_config):
        done.servers = {one.name: one for one in contenders}
        contest = Contest(workload, goodput=settings.goodput, has_priorities=settings.priorities)

        def apply(name: str, phase: Phase) -> None:
            for contender in contenders:
                say(f"{name}: {contender.name}, {phase.duration_s:g} s")
                figures, run = contest.run(contender, phase)
                done.figures.setdefault(name, {})[contender.name] = figures
                done.runs.setdefault(name, {})[contender.name] = run

        for contender in contenders:
            say(f"{ALONE}: {contender.name}")
            done.alone_ttft_ms[contender.name] = contest.alone(contender)
        rate, duration_s = settings.rate, settings.duration
        if rate is None:
            duration_s /= 2
            apply(SATURATED, Phase(duration_s=duration_s, concurrency=settings.concurrency))
            slowest = min(one.load.request_throughput_per_s for one in done.figures[SATURATED].values())
            rate = STEADY_SHARE * slowest
        done.rates[STEADY] = rate
        sessions_per_s = rate / mean_turns(workload)
        apply(STEADY, Phase(duration_s=duration_s, rate=sessions_per_s, seed=_STEADY_SEED))
    if measure is not None and engine_config is not None:
        say("measuring the machine")
        done.machine = machine = measure(engine_config)
        done.figures = {
            phase: {server: one.against(machine) for server, one in servers.items()}
            for phase, servers in done.figures.items()
        }
    return done


@contextmanager
def _servers(
    config: EngineConfig, settings: BenchmarkSettings, say: Callable[[str], None]
) -> Iterator[tuple[list[Contender], WorkloadSettings, EngineConfig | None]]:
    """Start all servers, ours first; give them, the load that fits them, and our engine's configuration."""
    with ExitStack() as stack:
        if settings.base_url is not None:
            contenders = [Contender(name="sagellm", url=settings.base_url)]
            limits = _Fit()
        else:
            say(f"starting sagellm: {config.model.name}")
            contenders = [stack.enter_context(own_server(config))]
            limits = _Fit.of(contenders[0])
        workload = _workload(settings, limits)
        longest = None if limits.num_kv_tokens is None else workload.max_len
        for peer in settings.peers:
            say(f"{'starting' if peer.command else 'using'} {peer.name}")
            wanted = limits.config or config
            contenders.append(stack.enter_context(peer_server(peer, wanted, limits.num_kv_tokens, longest)))
        yield contenders, workload, limits.config


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """What our own engine says of its limits, after it chose what was "auto"."""

    config: EngineConfig | None = None
    vocab_size: int = 4000
    max_len: int = 4096
    num_kv_tokens: int | None = None

    @classmethod
    def of(cls, contender: Contender) -> _Fit:
        from sagellm.engines.config.schema import EngineConfig
        from sagellm.server.remote import AdminClient

        assert contender.admin_socket is not None, "our own server has one"
        with AdminClient.connect(contender.admin_socket, timeout_s=_ANSWER_S) as client:
            hello: Hello = client.hello
        values = hello.config
        return cls(
            config=EngineConfig.from_values(values),
            vocab_size=hello.limits.vocab_size,
            max_len=hello.limits.max_model_len,
            num_kv_tokens=int(values["kv.num_blocks"]) * int(values["kv.block_size"]),
        )


def _workload(settings: BenchmarkSettings, limits: _Fit) -> WorkloadSettings:
    longest = limits.max_len if limits.num_kv_tokens is None else min(limits.max_len, limits.num_kv_tokens)
    return WorkloadSettings(
        name=settings.workload,
        vocab_size=settings.vocab_size or limits.vocab_size,
        max_len=min(settings.max_len or 4096, longest),
        seed=settings.seed,
    )


_HEADLINE = {
    "output_throughput_tokens_per_s": "load.output_throughput_tokens_per_s",
    "total_throughput_tokens_per_s": "load.total_throughput_tokens_per_s",
    "request_throughput_per_s": "load.request_throughput_per_s",
    "goodput_requests_per_s": "load.goodput_requests_per_s",
    "high_priority_ttft_p99_ms": "high_priority.ttft_ms.p99",
    "high_priority_e2e_p99_ms": "high_priority.e2e_ms.p99",
    "ttft_p99_ms": "load.ttft_ms.p99",
    "tpot_median_ms": "load.tpot_ms.median",
    "itl_p99_ms": "load.itl_ms.p99",
    "kv_held_share": "kv.held_share",
    "kv_held_share_under_pressure": "kv.held_share_under_pressure",
    "kv_live_share": "kv.live_share",
    "token_saving": "token_saving",
    "token_hit_rate": "token_hit_rate",
    "ideal_hit_rate": "ideal_hit_rate",
    "share_of_ideal": "share_of_ideal",
    "mfu": "limits.mfu",
    "bandwidth_use": "limits.bandwidth_use",
    "roofline_ratio": "limits.roofline_ratio",
    "num_failed": "load.num_failed",
    "peak_rss_mib": "peak_rss_mib",
}
"""What a benchmark is read for, and where `PhaseFigures` has it."""


def headline(done: BenchmarkRun) -> dict[str, dict[str, float | None]]:
    """Return the figures that a benchmark is read for, where a server has them: name → server → value."""
    alone = {
        f"{ALONE}.high_priority_ttft_{name}_ms": {
            server: None if one is None else getattr(one, name) for server, one in done.alone_ttft_ms.items()
        }
        for name in ("median", "max")
    }
    phases = {
        f"{phase}.{name}": {server: _read(one, path) for server, one in servers.items()}
        for phase, servers in done.figures.items()
        for name, path in _HEADLINE.items()
    }
    rows = alone | phases
    return {name: row for name, row in rows.items() if any(value is not None for value in row.values())}


def _read(figures: PhaseFigures, path: str) -> float | None:
    found: Any = figures
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    value: float | None = found
    return value


def measurement_errors(phases: dict[str, dict[str, PhaseFigures]]) -> list[str]:
    """Return what of the figures cannot be true, with phase and server."""
    return [
        f"{phase}, {server}: {one.limits.mfu_error}"
        for phase, servers in phases.items()
        for server, one in servers.items()
        if one.limits is not None and one.limits.mfu_error is not None
    ]
