"""Where the spans of an engine's steps go, and the counting of its work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sagellm.core import Clock, ConfigError, ModelSpec
from sagellm.engines.tracing import ChromeTraceWriter, NullTrace, TraceWriter
from sagellm.engines.worker.work import WorkMeter

if TYPE_CHECKING:
    from sagellm.engines.config.schema import EngineConfig
    from sagellm.engines.engine_core.building import CorePlan
    from sagellm.engines.engine_core.core import EngineCore


def open_step_trace(config: EngineConfig, clock: Clock) -> TraceWriter:
    """Return what takes the spans of steps: a profile, in front of the trace, if one is wanted."""
    trace = open_trace(config.trace.file, clock)
    if not config.trace.profile:
        return trace
    from sagellm.engines.profiling import StepProfile

    return StepProfile(trace, clock, wait=_waiting_for(config.model.device))


def open_trace(path: str | None, clock: Clock) -> TraceWriter:
    """Return a tracer that writes to this file, or nowhere. Raises ConfigError if it cannot be written."""
    if path is None:
        return NullTrace()
    try:
        return ChromeTraceWriter(path, clock)
    except OSError as error:
        raise ConfigError(
            f"trace.file is {path!r}, which cannot be written: {error.strerror}; name another file"
        ) from error


def count_work(core: EngineCore, plan: CorePlan, spec: ModelSpec, dtype: str) -> None:
    """Have a core count its work, and the profile, if there is one, take the operations of each step."""
    core.runner.work = WorkMeter([each.sliding_window for each in spec.attention])
    if not plan.modules.config.trace.profile:
        return
    from sagellm.engines.metrics.profile import ProfiledModel
    from sagellm.engines.profiling import StepProfile

    assert isinstance(plan.trace, StepProfile), "the trace was made so"
    assert plan.geometry is not None, "a core that computes has one"
    core.profile, backend = plan.trace, core.runner.backend
    weights = backend.model_metrics().operations
    model = ProfiledModel(geometry=plan.geometry, layout=plan.layout, weights=weights, dtype=dtype)
    core.profile.begin(core.runner.work, model, str(core.runner.device))
    backend.report_operations(core.profile.take_operations)


def _waiting_for(device: str) -> Callable[[], None] | None:
    """Return what waits for a GPU; None for a CPU, which computes at once."""
    if device == "cpu":
        return None
    import torch

    return partial(torch.cuda.synchronize, device)
