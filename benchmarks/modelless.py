"""The production core around a forward pass that computes nothing."""

from __future__ import annotations

from sagellm.core import KVGroup, KVLayout, NullForwardBackend, Runtime
from sagellm.engines.assembly import Modules, build_core
from sagellm.engines.engine_core.core import EngineCore


def modelless_core(modules: Modules, num_blocks: int) -> EngineCore:
    """Build it with scheduler, pool and cache as configured."""
    group = KVGroup(layer_ids=(0,), num_kv_heads=1, head_dim=8)
    return build_core(
        modules,
        NullForwardBackend(),
        KVLayout(group=group, block_size=modules.config.kv.block_size),
        num_blocks=num_blocks,
        vocab_size=1,
        runtime=Runtime.system(seed=0),
    )
