"""Takes the time of the parts of an engine's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from sagellm.core import Clock, SageLLMError, get_logger
from sagellm.core.protocols.forward import TimedOperation
from sagellm.engines.metrics.profile import (
    PARTS,
    Profile,
    ProfiledModel,
    ProfileLimits,
    StepKind,
    StepSums,
    measured_limits,
    profile_of,
)
from sagellm.engines.tracing import TraceValue, TraceWriter
from sagellm.engines.worker.work import WorkCounts, WorkMeter

_logger = get_logger(__name__)


class StepProfile(TraceWriter):
    """Adds up the spans of steps and the operations inside them, and passes everything on to a trace.

    Only steps with a forward pass count. `wait` waits for the device, so that the time of sampling is its
    own. What it takes to note the operations is left out. `close` prints the profile on standard error.
    """

    def __init__(self, trace: TraceWriter, clock: Clock, *, wait: Callable[[], None] | None = None) -> None:
        self._trace, self._clock, self._wait = trace, clock, wait
        self._steps: dict[StepKind, StepSums] = {}
        self._durations_ns: Counter[str] = Counter()  # of the parts of the current step
        self._num_calls: Counter[str] = Counter()
        self._meter, self._before = WorkMeter(), WorkCounts()
        self._model: ProfiledModel | None = None
        self._measure: Callable[[], ProfileLimits] | None = None

    def begin(self, meter: WorkMeter, model: ProfiledModel, device: str) -> None:
        """Begin to profile an engine: the worker's meter, and what is computed on which device.

        Measures the limits for about two seconds. They vary where a machine is shared, so the first call of
        `figures` does so again, and the best counts.
        """
        self._meter, self._model = meter, model
        before = measured_limits(model, device)
        self._measure = cache(lambda: before.best(measured_limits(model, device)))

    def take_operations(self, operations: Sequence[TimedOperation]) -> None:
        """Take the operations of a forward pass that is about to end."""
        noted_ns = self._clock.now_ns()
        for name, start_ns, end_ns in operations:
            self._add(name, end_ns - start_ns)
            self._durations_ns["forward"] -= end_ns - start_ns
            self._trace.past_span(name, start_ns, end_ns)
        noted_ns -= self._clock.now_ns()
        self._durations_ns["forward"] += noted_ns
        self._durations_ns["step"] += noted_ns

    def clear(self) -> None:
        """Forget all steps so far."""
        self._steps.clear()

    def figures(self) -> Profile:
        """Return the figures so far. The first call measures the limits, two seconds with all cores."""
        assert self._model is not None, "an engine begins its profile"
        assert self._measure is not None, "an engine begins its profile"
        return profile_of(self._steps, self._model, self._measure())

    @contextmanager
    def span(self, name: str, /, **args: TraceValue) -> Iterator[None]:
        """Time a span, and trace it."""
        if name == "step":
            self._durations_ns.clear()
            self._num_calls.clear()
            self._before = self._meter.counts
        start_ns = self._clock.now_ns()
        with self._trace.span(name, **args):
            yield
            if name == "sample" and self._wait is not None:
                self._wait()
        self._add(name, self._clock.now_ns() - start_ns)
        if name == "step":
            self._end_step()

    def _add(self, name: str, duration_ns: int) -> None:
        self._durations_ns[name] += duration_ns
        self._num_calls[name] += 1

    def _end_step(self) -> None:
        durations_ns, num_calls = self._durations_ns, self._num_calls
        done = self._meter.counts.plus(self._before, -1)
        if not done.num_steps:
            return
        kinds: dict[tuple[bool, bool], StepKind] = {(True, False): "decode", (False, True): "prefill"}
        kind = kinds.get((num_calls["decode"] > 0, num_calls["prefill"] > 0), "mixed")
        steps = self._steps.setdefault(kind, StepSums())
        steps.counts = steps.counts.plus(done)
        steps.whole.add(1, durations_ns["step"])
        for name in PARTS:
            if num_calls[name]:
                steps.add(name, num_calls[name], durations_ns[name])
        steps.add("rest", 1, durations_ns["step"] - sum(durations_ns[name] for name in PARTS))

    def past_span(self, name: str, start_ns: int, end_ns: int) -> None:
        """Pass it on."""
        self._trace.past_span(name, start_ns, end_ns)

    def instant(self, name: str, /, **args: TraceValue) -> None:
        """Pass it on."""
        self._trace.instant(name, **args)

    def counter(self, name: str, /, **values: int | float) -> None:
        """Pass it on."""
        self._trace.counter(name, **values)

    def begin_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Pass it on."""
        self._trace.begin_async(name, async_id, **args)

    def mark_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Pass it on."""
        self._trace.mark_async(name, async_id, **args)

    def end_async(self, name: str, async_id: str, /, **args: TraceValue) -> None:
        """Pass it on."""
        self._trace.end_async(name, async_id, **args)

    def flush(self) -> None:
        """Pass it on."""
        self._trace.flush()

    def close(self) -> None:
        """Close the trace, and print the profile."""
        self._trace.close()
        if not self._steps:
            return
        try:
            from sagellm.engines.cli.profile import print_profile

            print_profile(self.figures())
        except (SageLLMError, MemoryError, OSError, RuntimeError) as error:
            _logger.warning("the profile cannot be printed: %s", error)
        self._steps.clear()
