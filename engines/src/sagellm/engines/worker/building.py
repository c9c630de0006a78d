"""Builds the worker of a core: forward backend, sampler and state by seat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from sagellm.core import ForwardBackendProtocol, LogitsProcessorProtocol
from sagellm.engines.engine_core.building import CorePlan
from sagellm.engines.loading.device_and_dtype import device_name
from sagellm.engines.modules import extra_args
from sagellm.engines.sampling import draws
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.worker.model_runner import ModelRunner
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.step_graphs import StepGraphs
from sagellm.engines.worker.worker import Worker


def build_worker(
    plan: CorePlan,
    backend: ForwardBackendProtocol,
    processors: Mapping[str, LogitsProcessorProtocol[Any]],
    around_step: Callable[[], AbstractContextManager[object]],
) -> Worker:
    """Allocate the KV of a backend and build the worker around it. Raises OutOfMemoryError."""
    modules, layout = plan.modules, plan.layout
    config = modules.config
    device = device_name(config.model.device)
    draw = draws.device_draw(device)
    runner = ModelRunner(
        backend,
        [layout],
        device=device,
        geometry=plan.geometry,
        has_arrays=backend.takes_arrays and isinstance(draw, draws.HostDraw),
    )
    runner.initialize_kv_caches([plan.num_blocks])
    sampler = Sampler(
        processors.values(),
        extra_args(modules, processors),
        labels=[modules.label("logits_processor", name) for name in processors],
    )
    state = SeatState(config.scheduler.max_num_seqs, block_size=layout.block_size)
    graphs = StepGraphs(state, layout, trace=plan.trace, cost=lambda: plan.cost_fit.cost)
    return Worker(
        runner,
        sampler,
        state,
        graphs=graphs,
        around=around_step,
        draw=draw,
        buffers=plan.buffers,
    )
