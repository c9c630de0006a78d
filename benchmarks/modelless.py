"""The production core around a forward pass that computes nothing."""

from __future__ import annotations

from sagellm.core import KVGroup, KVLayout, Runtime
from sagellm.core.protocols.forward import NullForwardBackend
from sagellm.engines.assembly import build_computing_core
from sagellm.engines.engine_core.building import CorePlan
from sagellm.engines.engine_core.core import EngineCore
from sagellm.engines.modules import Modules


def modelless_core(modules: Modules, num_blocks: int) -> EngineCore:
    """Build it with scheduler, pool and cache as configured."""
    group = KVGroup(layer_ids=(0,), num_kv_heads=1, head_dim=8)
    plan = CorePlan(
        modules=modules,
        layout=KVLayout(group=group, block_size=modules.config.kv.block_size),
        num_blocks=num_blocks,
        vocab_size=1,
        runtime=Runtime.system(seed=0),
    )
    return build_computing_core(plan, NullForwardBackend())
