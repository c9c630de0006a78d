"""The execution graph of the step that a worker computes, and what is drawn from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from sagellm.core import KVLayout, StepCost, StepInput
from sagellm.engines.tracing import NullTrace, TraceValue, TraceWriter
from sagellm.engines.worker.execution_graph import FORWARD_KINDS, ExecutionGraph, GraphNode, lower_step
from sagellm.engines.worker.seat_state import SeatState


class StepGraphs:
    """Lowers steps, and traces the nodes of the step that is being computed.

    Unless a trace is written or somebody watches, a step without transfers is not lowered, as there is only
    one way to execute it: a forward pass, then sampling.
    """

    def __init__(
        self,
        state: SeatState,
        layout: KVLayout,
        *,
        trace: TraceWriter | None = None,
        cost: Callable[[], StepCost | None] = lambda: None,
    ) -> None:
        """Create it. `cost` returns the current estimate of what steps cost."""
        self.trace = trace or NullTrace()
        self._is_traced = not isinstance(self.trace, NullTrace)
        self._state, self._layout, self._cost = state, layout, cost
        self._watchers: list[Callable[[ExecutionGraph], None]] = []
        self._current: ExecutionGraph | None = None

    def watch(self, take: Callable[[ExecutionGraph], None]) -> None:
        """Have `take` called with the graph of each later step, before it is executed."""
        self._watchers.append(take)

    def begin(self, step: StepInput) -> tuple[GraphNode, ...]:
        """Make a step the current one, once its blocks are in the tables; return its transfers in order."""
        self._current = None
        if self._watchers:
            tables = self._state.tables[0, step.seats]
            self._current = lower_step(step, layout=self._layout, tables=tables, cost=self._cost())
            for take in self._watchers:
                take(self._current)
        elif self._is_traced or step.kv_ops:
            cost = self._cost() if self._is_traced else None
            self._current = lower_step(step, layout=self._layout, cost=cost)
        return () if self._current is None else self._current.nodes[: len(step.kv_ops)]

    def transfer(self, node: GraphNode) -> AbstractContextManager[object]:
        """Trace a transfer of KV."""
        if not self._is_traced:
            return nullcontext()
        num_blocks = len(node.reads or node.writes or ())
        return self.trace.span(node.kind, blocks=num_blocks, bytes=node.num_bytes)

    def forward(self) -> AbstractContextManager[object]:
        """Trace the forward pass, and inside it a span for each node that it computes."""
        if not self._is_traced or self._current is None:
            return nullcontext()
        spans = ExitStack()
        estimated = _estimate("estimated_step_us", self._current.cost_ns)
        spans.enter_context(self.trace.span("forward", **estimated))
        for node in self._current.nodes:
            if node.kind in FORWARD_KINDS:
                spans.enter_context(self.trace.span(node.kind, **_computed(node)))
        return spans

    def sample(self) -> AbstractContextManager[object]:
        """Trace sampling."""
        if not self._is_traced or self._current is None:
            return nullcontext()
        sampling = [node for node in self._current.nodes if node.kind == "sample"]
        return self.trace.span("sample", **(_computed(sampling[0]) if sampling else {}))


def _computed(node: GraphNode) -> dict[str, TraceValue]:
    return {
        "rows": len(node.rows),
        "tokens": node.num_tokens,
        **_estimate("estimated_us", node.cost_ns),
    }


def _estimate(name: str, cost_ns: float | None) -> dict[str, TraceValue]:
    return {} if cost_ns is None else {name: round(cost_ns / 1000, 1)}
