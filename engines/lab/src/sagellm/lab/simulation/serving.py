"""Simulates serving: a trace through the production core on virtual time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from sagellm.core import (
    ConfigError,
    LifetimeMetrics,
    LifetimePredictorProtocol,
    PluginError,
    PluginRegistry,
    SchedulerMetrics,
    StepInput,
    TraceRequest,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.batching import BatchingMetrics
from sagellm.engines.progress import Advance
from sagellm.lab.simulation.served_load import LoadRun, LoadSettings, ServedRequest, recorded_outputs
from sagellm.lab.simulation.serving_figures import (
    Counts,
    ServingFigures,
    ServingLimits,
    serving_figures,
)
from sagellm.lab.simulation.simulated_core import build_simulated_core
from sagellm.lab.simulation.step_costs import StepCosts
from sagellm.lab.simulation.tenant_shares import TenantShares
from sagellm.lab.simulation.virtual_executor import END


@dataclass(frozen=True, kw_only=True)
class ServingRun:
    """What one simulated run did. `config` has the values that followed from the costs."""

    config: EngineConfig
    figures: ServingFigures
    scheduler: SchedulerMetrics | None  # None if the configured scheduler has other metrics
    predictor: LifetimeMetrics  # the engine's scores of it
    requests: list[ServedRequest] = field(repr=False)


def simulate_serving(  # noqa: PLR0913  (what a simulation varies)
    requests: Seq[TraceRequest],
    config: EngineConfig,
    costs: StepCosts,
    *,
    load: LoadSettings | None = None,
    limits: ServingLimits | None = None,
    predictor: LifetimePredictorProtocol | None = None,
    registry: PluginRegistry | None = None,
    foresees: bool = True,
    advance: Advance = lambda amount: None,
) -> ServingRun:
    """Run a trace to its end. Equal calls give equal results.

    Steps take time, tiers, and between steps the host, as far as `costs` say. `predictor` replaces the
    configured one. Without `foresees`, each step is planned by itself, which is slower and gives the same
    results. Raises ConfigError for a configuration that cannot be simulated, PluginError if a pass
    fails.
    """
    load = replace(load or LoadSettings(), stop_token_ids=frozenset({END}))
    if not 0 < load.stretch < float("inf"):
        raise ConfigError(f"stretch is {load.stretch}; it must be a number above 0")
    outputs = recorded_outputs(requests)
    made = build_simulated_core(
        config, costs, outputs, registry=registry, predictor=predictor, foresees=foresees
    )
    core, executor = made.core, made.executor

    def on_host(num_added: int) -> None:
        made.clock.advance_ns(round(costs.host_step_ns + num_added * costs.host_request_ns))

    run = LoadRun(core, made.clock, requests, load, on_host=on_host)
    shares = TenantShares(core) if len({one.tenant for one in requests}) > 1 else None

    def on_step(step: StepInput, last_ns: int) -> None:
        run.on_step(step)
        if shares is not None:
            shares.on_step(step, made.clock.now_ns(), last_ns)

    executor.on_step, executor.next_arrival_ns = on_step, run.next_arrival_ns
    served = run.run(advance)
    for name, failure in core.parts.passes.metrics().failures.items():
        raise PluginError(f"the scheduler pass {name} cannot be judged: {failure}")
    modules = core.metrics().modules
    batching, scheduler = modules["batching"], modules["scheduler"]
    scores = modules["lifetime_predictor"]
    assert isinstance(batching, BatchingMetrics), "the core measures it itself"
    assert isinstance(scores, LifetimeMetrics), "the core scores it itself"
    core.kv.check_integrity()
    core.close()
    counts = Counts(
        busy_s=executor.busy_ns / 1e9,
        num_steps=executor.num_steps,
        num_computed_tokens=executor.num_tokens,
        batching_efficiency=batching.batching_efficiency,
        lowered_batching_efficiency=batching.lowered_batching_efficiency,
        jains_index=None if shares is None else shares.index(),
    )
    return ServingRun(
        config=made.config,
        figures=serving_figures(served, counts, limits or ServingLimits(), costs.prefill_ns),
        scheduler=scheduler if isinstance(scheduler, SchedulerMetrics) else None,
        predictor=scores,
        requests=served,
    )


def with_passes(config: EngineConfig, text: str) -> EngineConfig:
    """Return a configuration with these scheduler passes; stages that the text leaves out stay."""
    return config.with_values({"scheduler.passes": text})
