"""The production core on virtual time: every module that decides is real, and nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sagellm.core import (
    ConfigError,
    KVGroup,
    KVLayout,
    KVMemory,
    KVOffloadProtocol,
    KVTierProtocol,
    LifetimePredictorProtocol,
    PluginRegistry,
    Runtime,
    SequenceId,
    VirtualClock,
)
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.engine_core.building import CorePlan, build_core, default_step_target_ms
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.modules import Modules
from sagellm.engines.sizes import parse_bytes
from sagellm.lab.simulation.costed_tier import CostedKVTier
from sagellm.lab.simulation.step_costs import StepCosts
from sagellm.lab.simulation.virtual_executor import VOCAB_SIZE, RecordedOutput, VirtualExecutor

_GROUP = KVGroup(layer_ids=(0,), num_kv_heads=1, head_dim=8)
"""The shape of KV that nothing stores; its real size is in the costs."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCore:
    """A core, the clock that it runs on, and the executor that advances it."""

    config: EngineConfig
    core: EngineCore
    clock: VirtualClock
    executor: VirtualExecutor


def build_simulated_core(
    config: EngineConfig,
    costs: StepCosts,
    outputs: Mapping[SequenceId, RecordedOutput],
    *,
    registry: PluginRegistry | None = None,
    predictor: LifetimePredictorProtocol | None = None,
    foresees: bool = True,
) -> SimulatedCore:
    """Build a core whose steps take what `costs` says, and whose outputs are these.

    What the configuration leaves open follows the costs: the blocks that fit, and a step's target. Tiers are
    those of `kv.tiers`; they store nothing and take the costs' time. `predictor` replaces the configured one.
    Nothing drafts. Unless tiers or observers see each step, those that stay the same are planned once;
    without `foresees`, each is planned. Raises ConfigError if the costs lack what the configuration needs.
    """
    config = _with_defaults(config, costs)
    num_blocks, num_seats = config.kv.num_blocks, config.scheduler.max_num_seqs
    assert num_blocks is not None, "the defaults include it"
    clock = VirtualClock()
    modules = Modules(registry or PluginRegistry.load(), config)
    host_ns = round(costs.host_step_ns)
    executor = VirtualExecutor(costs.step, clock, outputs, num_seats, host_step_ns=host_ns)
    sizes = _tiers(config, costs)
    sees_steps = bool(sizes or modules.registry.callers("sagellm_step_finished"))

    def make_offload(memory: KVMemory) -> KVOffloadProtocol:
        tiers: dict[str, KVTierProtocol] = {
            name: CostedKVTier(max_blocks, get_ns=get_ns, clock=clock)
            for name, (max_blocks, get_ns) in sizes.items()
        }
        made: KVOffloadProtocol = modules.make(
            "kv_offload", "tiered", memory, tiers=tiers, rule=config.kv.fetch, clock=clock
        )
        return made

    plan = CorePlan(
        modules=modules,
        layout=KVLayout(group=_GROUP, block_size=config.kv.block_size),
        num_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
        runtime=replace(Runtime.virtual(), clock=clock),
        predictor=predictor,
        make_offload=make_offload if sizes else None,
        foresee=executor.foresee if foresees and not sees_steps else None,
    )
    core = build_core(plan, executor)
    return SimulatedCore(config=config, core=core, clock=clock, executor=executor)


def _with_defaults(config: EngineConfig, costs: StepCosts) -> EngineConfig:
    num_blocks = config.kv.num_blocks or costs.num_blocks(config.kv.block_size)
    if not num_blocks:
        raise ConfigError(
            "kv.num_blocks is null, and the costs have no kv_bytes_per_token and kv_memory_bytes that fit "
            "a block; say how many there are with --num-blocks"
        )
    target_ms = config.scheduler.step_target_ms or default_step_target_ms(costs.device)
    return config.with_values(
        {
            "kv.num_blocks": num_blocks,
            "scheduler.step_target_ms": target_ms,
            "model.device": "cpu",
            "speculation.proposer": None,
        }
    )


def _tiers(config: EngineConfig, costs: StepCosts) -> dict[str, tuple[int, int]]:
    """Return how many blocks each configured tier holds, and how long fetching one takes."""
    block_size = config.kv.block_size
    found: dict[str, tuple[int, int]] = {}
    for spec in config.kv.tiers:
        max_bytes = parse_bytes(spec.options["max_bytes"], f"kv.tiers.{spec.name}")
        if not max_bytes:
            continue
        get_ns = costs.fetch_ns(spec.name, block_size)
        assert costs.kv_bytes_per_token is not None, "the cost of fetching follows from it"
        found[spec.name] = (max_bytes // (costs.kv_bytes_per_token * block_size), get_ns)
    return found
