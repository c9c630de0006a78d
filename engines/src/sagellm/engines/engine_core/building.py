"""Builds a core around an executor: KV, scheduler, and the loop that drives them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sagellm.core import (
    ExecutorProtocol,
    KVIdentity,
    KVLayout,
    KVMemory,
    KVOffloadProtocol,
    LifetimePredictorProtocol,
    ModelGeometry,
    ProviderSpec,
    Runtime,
    SchedulerIRProtocol,
)
from sagellm.core.protocols.step import HostBuffers
from sagellm.core.step_cost import StepCostMetrics
from sagellm.engines.attention.progress_hook import ProgressHook
from sagellm.engines.engine_core.batching import BatchingMeter
from sagellm.engines.engine_core.core import CoreParts, EngineCore
from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager
from sagellm.engines.engine_core.kv_modules import KVModules, build_kv
from sagellm.engines.engine_core.kv_tiers import build_offload, build_saves
from sagellm.engines.engine_core.pass_admin import PassAdmin
from sagellm.engines.engine_core.preparing import Grammar, Preparing, no_grammar
from sagellm.engines.engine_core.scheduler import Foresight, Scheduler
from sagellm.engines.engine_core.seats import Seats
from sagellm.engines.engine_core.speculation import Speculation
from sagellm.engines.engine_core.step_cost_fit import StepCostFit
from sagellm.engines.engine_core.step_runner import StepRunner
from sagellm.engines.engine_core.token_masks import GrammarMasks
from sagellm.engines.modules import Modules
from sagellm.engines.recording.recorder import Recorder
from sagellm.engines.tracing import NullTrace, TraceWriter

if TYPE_CHECKING:
    from sagellm.engines.worker.worker import Worker


def default_step_target_ms(device: str) -> float:
    """Return how long a step may take while others decode or wait, unless the configuration says."""
    return 50.0 if device.startswith("cuda") else 250.0


@dataclass(frozen=True, kw_only=True)
class CorePlan:
    """What a core is built from. The core closes `trace`.

    `fingerprint` returns a value that is equal for models with interchangeable KV; it is called when a tier
    or a save first needs it. `progress` is the hook that a backend calls at each layer. `predictor` and
    `make_offload`, of a simulation for instance, take the place of what the configuration names.
    An executor that knows outputs in advance can `foresee` how long steps stay the same, which are then
    planned once. `make_grammar` returns the provider of grammars. `recorder` may have begun to
    record. Steps can want hidden states if `geometry` is given.
    """

    modules: Modules
    layout: KVLayout
    num_blocks: int
    vocab_size: int
    runtime: Runtime
    geometry: ModelGeometry | None = None
    fingerprint: Callable[[], str] = str
    trace: TraceWriter = field(default_factory=NullTrace)
    progress: ProgressHook = field(default_factory=ProgressHook)
    predictor: LifetimePredictorProtocol | None = None
    make_offload: Callable[[KVMemory], KVOffloadProtocol] | None = None
    cost_fit: StepCostFit = field(default_factory=StepCostFit)
    buffers: HostBuffers = field(default_factory=HostBuffers)
    foresee: Foresight | None = None
    make_grammar: Callable[[], Grammar] = no_grammar
    recorder: Recorder | None = None

    @property
    def step_target_ms(self) -> float:
        """How long a step may take while others decode or wait."""
        config = self.modules.config
        if config.scheduler.step_target_ms is not None:
            return config.scheduler.step_target_ms
        return default_step_target_ms(config.model.device)


def build_core(plan: CorePlan, executor: ExecutorProtocol, worker: Worker | None = None) -> EngineCore:
    """Build a core whose steps an executor computes; `worker` is the one of this process, if any."""
    modules, runtime = plan.modules, plan.runtime
    config = modules.config
    seats = Seats(config.scheduler.max_num_seqs, block_size=plan.layout.block_size)
    label = modules.label("executor", config.forward.executor.name)
    preparing = Preparing(plan.make_grammar, runtime.clock)
    steps = StepRunner(
        executor,
        seats,
        runtime.clock,
        label=label,
        vocab_size=plan.vocab_size,
        buffers=plan.buffers,
        masks=GrammarMasks(seats, plan.vocab_size, runtime.clock, preparing.count_masks),
    )
    memory, kv = _build_kv(plan, seats, steps)
    make_speculation = partial(_make_speculation, plan, kv.manager)
    speculation = make_speculation(config.speculation.proposer)
    ir, passes, scheduler, batching = _build_scheduler(plan, kv.manager, speculation)
    core = EngineCore(
        CoreParts(
            scheduler=scheduler,
            kv=kv.manager,
            saves=build_saves(modules, memory, kv.manager, plan.fingerprint, runtime),
            steps=steps,
            executor=executor,
            worker=worker,
            predictor=plan.predictor or modules.make("lifetime_predictor", config.predictor.name),
            registry=modules.registry,
            runtime=runtime,
            cost_fit=plan.cost_fit,
            passes=passes,
            make_speculation=make_speculation,
            trace=plan.trace,
            metrics_of={
                **kv.metrics_of,
                "scheduler": ir.metrics,
                "scheduler_pass": passes.metrics,
                "step_cost": lambda: StepCostMetrics(
                    cost=plan.cost_fit.cost, step_target_ms=plan.step_target_ms
                ),
                "batching": batching.metrics,
            },
            progress=plan.progress,
            preparing=preparing,
            recorder=plan.recorder or Recorder(config.recording, runtime.clock, plan.layout.block_size),
        )
    )
    if config.prefix_cache.shadow:
        from sagellm.engines.engine_core.shadows import ShadowCaches

        prefix = config.prefix_cache
        core.run_shadows(ShadowCaches(modules, prefix.shadow, kv.manager, sample=prefix.shadow_sample))
    return core


def _build_kv(plan: CorePlan, seats: Seats, steps: StepRunner) -> tuple[KVMemory, KVModules]:
    """Build pool, prefix cache and tiers."""
    modules, layout = plan.modules, plan.layout
    fingerprint = plan.fingerprint() if modules.config.kv.tiers else ""
    identity = KVIdentity(fingerprint, layout.signature, layout.group.dtype)
    memory = KVMemory(steps, layout.block_size, layout.block_bytes, identity)
    offload = plan.make_offload(memory) if plan.make_offload else build_offload(modules, memory, plan.runtime)
    return memory, build_kv(
        modules, seats, plan.num_blocks, plan.runtime.clock, identity=identity, offload=offload
    )


def _make_speculation(plan: CorePlan, kv: KVCacheManager, spec: ProviderSpec | None) -> Speculation | None:
    """Make what adds drafts to steps, if there is to be a proposer."""
    config = plan.modules.config
    if spec is None:
        return None
    return Speculation(
        plan.modules.make("draft_proposer", spec),
        kv,
        name=plan.modules.label("draft_proposer", spec.name),
        now_ns=plan.runtime.clock.now_ns,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        vocab_size=plan.vocab_size,
        is_adaptive=config.speculation.adaptive,
    )


def _build_scheduler(
    plan: CorePlan, kv: KVCacheManager, speculation: Speculation | None
) -> tuple[SchedulerIRProtocol, PassAdmin, Scheduler, BatchingMeter]:
    """Build what decides, the queues that carry it out, and the meter of both."""
    config, clock = plan.modules.config.scheduler, plan.runtime.clock
    limits = {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
    }
    scheduler: Scheduler
    ir: SchedulerIRProtocol = plan.modules.make(
        "scheduler",
        config.name,
        **limits,
        block_size=plan.layout.block_size,
        probe=lambda request: scheduler.probe(request),
        epoch=lambda: kv.epoch,
        clock=clock,
        cost=lambda: plan.cost_fit.cost,
        step_target_ms=plan.step_target_ms,
    )
    if config.print != "none":
        ir.watch(config.print)
    passes, batching = PassAdmin(ir, plan.modules), BatchingMeter(**limits)
    scheduler = Scheduler(
        ir, passes, kv, batching, now_ns=clock.now_ns, speculation=speculation, foresee=plan.foresee
    )
    return ir, passes, scheduler, batching
