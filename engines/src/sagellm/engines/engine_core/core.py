"""The step loop: schedule, run the model, sample, update."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sagellm.core import (
    BlockId,
    EngineError,
    EngineMetrics,
    EngineProtocol,
    ExecutorProtocol,
    FinishReason,
    InvalidRequestError,
    KVSavesProtocol,
    LifetimePredictorProtocol,
    OutOfBlocksError,
    PluginError,
    PluginRegistry,
    ProviderSpec,
    Runtime,
    SequenceId,
    StepWork,
    TokenOutput as TokenOutput,
    get_logger,
)
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.engine import STEP_TOKEN_BOUNDS, EngineSequence, PromptScores
from sagellm.core.protocols.step import CopyBlocks, KVOp, Seat
from sagellm.core.request import RequestRecord, StepRecord
from sagellm.engines.attention.progress_hook import ProgressHook
from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager
from sagellm.engines.engine_core.observers import Failures, Observers, Shadows, Watchers
from sagellm.engines.engine_core.pass_admin import PassAdmin
from sagellm.engines.engine_core.predictions import Predictions
from sagellm.engines.engine_core.preparing import Preparing
from sagellm.engines.engine_core.scheduler import Scheduler
from sagellm.engines.engine_core.sequence import RequestStatus, Sequence
from sagellm.engines.engine_core.speculation import Speculation
from sagellm.engines.engine_core.step_cost_fit import StepCostFit, decode_works, work_of
from sagellm.engines.engine_core.step_runner import DraftedRows, PlannedStep, StepResult, StepRunner
from sagellm.engines.engine_core.step_tokens import StepTokens
from sagellm.engines.logging import fields
from sagellm.engines.recording.recorder import Recorder
from sagellm.engines.sampling.stop import check_stop_conditions
from sagellm.engines.tracing import NullTrace, TraceWriter
from sagellm.engines.worker.execution_graph import ExecutionGraph

if TYPE_CHECKING:
    from sagellm.engines.profiling import StepProfile
    from sagellm.engines.worker.model_runner import ModelRunner
    from sagellm.engines.worker.worker import Worker

logger = get_logger(__name__)

_MAX_IDLE_STEPS = 1000
"""Steps in a row in which no sequence advances after which the scheduler counts as broken."""

_MAX_HELD_NS = 60 * 10**9
"""How long the decisions of passes may keep every sequence from advancing."""

_IDLE_WAIT_NS = 100_000
"""Between two steps while there is nothing to do but wait for a tier or a pass."""

_COMPILE_WAIT_S = 0.001
"""Between two steps while there is nothing to do but wait for a grammar."""

_STATUS: dict[FinishReason, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
    "deadline": RequestStatus.FINISHED_LATE,
    "error": RequestStatus.FINISHED_ERROR,
}


@dataclass(frozen=True, kw_only=True)
class CoreParts:
    """The assembled modules that the core drives."""

    scheduler: Scheduler
    kv: KVCacheManager
    saves: KVSavesProtocol
    steps: StepRunner
    executor: ExecutorProtocol
    worker: Worker | None = None  # of this process; None: another computes, or nothing does
    predictor: LifetimePredictorProtocol
    registry: PluginRegistry
    runtime: Runtime
    passes: PassAdmin
    make_speculation: Callable[[ProviderSpec | None], Speculation | None] = lambda spec: None
    cost_fit: StepCostFit = field(default_factory=StepCostFit)
    trace: TraceWriter = field(default_factory=NullTrace)
    metrics_of: dict[str, Callable[[], Any]] = field(default_factory=dict)
    progress: ProgressHook = field(default_factory=ProgressHook)
    preparing: Preparing
    recorder: Recorder


class EngineCore(EngineProtocol):
    """Runs sequences to their end, one step for all of them at a time: plan, submit, collect, commit.

    If the executor has a depth, that many steps are in flight while the next one is planned.

    A failure in the forward pass or in sampling belongs to one sequence, which StepRunner finds; only that
    one ends with the reason "error".

    A failure anywhere else in a step leaves it unclear which sequences it affected, so all of them end with
    the reason "error", and the next request finds the engine empty. Exceptions from an observer or the
    predictor are only logged. SystemExit from a module is a failure like any other; only KeyboardInterrupt
    propagates, wherever the step is. Who may be interrupted holds back Ctrl-C, as LLMEngine does.
    """

    def __init__(self, parts: CoreParts) -> None:
        self.parts = parts
        self.scheduler, self.kv, self.steps = parts.scheduler, parts.kv, parts.steps
        self._seats = parts.kv.seats
        self._trace = parts.trace
        self._is_traced = not isinstance(parts.trace, NullTrace)
        self.profile: StepProfile | None = None  # the trace, if it is one
        self._clock = parts.runtime.clock
        self._metrics = EngineMetrics()
        self._num_steps = self._num_idle_steps = 0
        self._idle_since_ns = 0
        self._work: StepWork | None = None  # of the step collected last
        self._num_preemptions_seen = 0
        self._preparing = parts.preparing
        self._predictions = Predictions(parts.predictor, parts.registry, parts.kv.cache, parts.kv.seats)
        self.add_metrics("grammar", parts.preparing.metrics)
        self.add_metrics("recorder", parts.recorder.metrics)
        self.add_metrics("lifetime_predictor", self._predictions.metrics)
        self.watchers = Watchers(parts.registry)
        self._untold: dict[str, Failures] = {}  # modules whose metrics raise
        self.shadows: Shadows | None = None
        self._add_speculation()
        self._request_observers = Observers(parts.registry, "sagellm_request_finished")
        self._step_observers = Observers(parts.registry, "sagellm_step_finished")
        if kv_observers := Observers(parts.registry, "sagellm_kv_events"):
            self.kv.observe(lambda events: kv_observers.tell(events=events))

    @property
    def worker(self) -> Worker:
        """The worker of this process, which a core that computes has."""
        assert self.parts.worker is not None, "nothing is computed here"
        return self.parts.worker

    @property
    def runner(self) -> ModelRunner:
        """The worker's model runner."""
        return self.worker.runner

    def step(self) -> Seq[TokenOutput]:
        """Plan and submit a step, and return the outputs of the previous one, or of this one."""
        with self._trace.span("step"):
            return self._step()

    def _step(self) -> Seq[TokenOutput]:
        started_ns = self._clock.now_ns()
        planned: PlannedStep | None = None
        outputs = StepTokens()
        with contained() as failure:
            self._end_late(started_ns, outputs)
            if self._preparing:
                self._take_prepared(outputs)
            self.kv.poll()
            with self._trace.span("schedule"):
                planned = self.scheduler.schedule(may_repeat=not outputs)
            if planned is not None:
                self.steps.submit(planned, self._copies())
            elif not self.steps.num_in_flight:
                if self._must_wait(outputs):
                    return outputs
                if (head := self.scheduler.shut_out()) is not None:
                    outputs.add(self._fail(head.sequence_id, self._no_room(head)))
            self._predictions.renew(1 if planned is None else planned.num_steps)
            has_advanced = False
            for result in self.steps.collect(0 if planned is None else self.steps.depth):
                has_advanced |= len(result.seats) > 0
                with self._trace.span("advance"):
                    self._advance(result, outputs)
            self._require_progress(planned, has_advanced=has_advanced or len(outputs) > 0)
            self._measure()
        if (error := failure.error) is not None:
            described = self.parts.registry.describe(error)
            logger.error("a step failed; every request ends with an error: %s", described, exc_info=error)
            for sequence_id in self.scheduler.sequence_ids:
                outputs.add(self._fail(sequence_id, error))
            self.kv.take_copies()  # what they were for has ended
            error = failure.error = None  # with the frames that failed, and their tensors
        self._observe(started_ns, planned)
        return outputs

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence."""
        if not isinstance(sequence, Sequence):
            sequence = Sequence.of(sequence)
        num_prompt_tokens = len(sequence.request.token_ids)
        self._predictions.begin(sequence)
        if self.watchers:
            self.watchers.arrived(sequence)
        self._metrics.num_prompt_tokens += num_prompt_tokens
        if sequence.params.structured_outputs is None or self._preparing.add(sequence):
            self.scheduler.add(sequence)
        else:
            self.scheduler.log.preparing(sequence)
        if self._is_traced:
            self._trace.begin_async("request", sequence.sequence_id, num_prompt_tokens=num_prompt_tokens)

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End sequences early; those that have already ended are skipped.

        One that is aborted after its deadline ends for that reason: the front may have seen it first.
        """
        now_ns = self._clock.now_ns()
        with self._without_exits():
            for sequence_id in sequence_ids:
                if sequence_id in self.scheduler or sequence_id in self._preparing:
                    deadline_ns = self._sequence(sequence_id).request.deadline_ns
                    is_late = finish_reason == "abort" and deadline_ns is not None and deadline_ns < now_ns
                    self._finish(sequence_id, "deadline" if is_late else finish_reason)
            self.kv.tell_events()

    def warm_up(self, sequence: EngineSequence) -> None:
        """Compute a prompt and one token after it, bypassing the scheduler, the cache and all metrics.

        Only before the first request: the KV goes into the first blocks, which are still unused. Raises
        EngineError if the model fails.
        """
        warming = Sequence.of(sequence)
        num_blocks = self.kv.num_blocks_for(warming.num_tokens + 1)
        seat = self._seats.take(
            warming, warming.token_ids(), [BlockId(each) for each in range(num_blocks)], 0
        )
        for num_new in (warming.num_tokens, 1):
            self.steps.submit(
                PlannedStep(seats=np.array([seat], np.intp), num_new=np.array([num_new], np.int32)), ()
            )
            for error in (error for result in self.steps.collect(0) for error in result.errors.values()):
                raise EngineError(f"the engine failed at its first step: {error}") from error
        self._seats.leave(seat)

    def has_unfinished(self) -> bool:
        """Say whether a sequence waits or runs, or its grammar is being compiled."""
        return self.scheduler.num_waiting + self.scheduler.num_running + len(self._preparing) > 0

    def use_idle_time(self) -> bool:
        """Let the backend prepare what later steps need; finish fetches whose requests were aborted.

        Returns whether there is more to do.
        """
        if self.kv.num_fetches:
            try:
                self.kv.poll()
            except Exception as error:
                logger.exception("an idle engine failed: %s", self.parts.registry.describe(error))
        if self.watchers:
            self.watchers.stepped(self._clock.now_ns())
        if self.shadows is not None and self.shadows.is_behind:
            return True
        return self.parts.worker is not None and self.runner.backend.use_idle_time()

    def close(self) -> None:
        """End all sequences and release files and connections. The engine must not be used afterwards."""
        with self._without_exits():
            try:
                self.abort([*self.scheduler.sequence_ids, *self._preparing.sequence_ids])
                list(self.steps.collect(0))
                self.parts.saves.close()
            finally:
                self._trace.close()
                self.parts.recorder.close()
                self._preparing.close()
                self.kv.close()
                self.parts.executor.close()

    def metrics(self) -> EngineMetrics:
        """Return a snapshot with the metrics of every module, but of those that fail to tell theirs."""
        modules = {}
        for kind, read in self.parts.metrics_of.items():
            with contained() as failure:
                modules[kind] = read()
            if failure.error is not None:
                if kind not in self._untold:
                    self._untold[kind] = Failures(self.parts.registry, f"metrics of {kind}")
                self._untold[kind].log(failure.error)
        return replace(
            self._metrics,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_preparing=len(self._preparing),
            num_deferred=self.scheduler.num_deferred,
            num_preemptions=self.scheduler.num_preemptions,
            steps_by_tokens=self._metrics.steps_by_tokens.copy(),
            modules=modules,
        )

    def replace_predictor(self, predictor: LifetimePredictorProtocol) -> None:
        """Predict lengths by another from now on, also of what is live. If it raises, the old one stays."""
        self._predictions.replace(predictor, list(self.live_sequences()))
        self.scheduler.read_predictions()

    def replace_proposer(self, spec: ProviderSpec | None) -> None:
        """Draft by another proposer from the next step on, or not at all. If it raises, the old one stays."""
        self.scheduler.speculation = self.parts.make_speculation(spec)
        self._add_speculation()

    def run_shadows(self, shadows: Shadows | None) -> None:
        """Run shadow caches beside the prefix cache from now on, in place of those that do."""
        self.parts.metrics_of.pop("shadows", None)
        if self.shadows is not None:
            self.watchers.remove(self.shadows)
        self.shadows = shadows
        if shadows is not None:
            self.watchers.add(shadows, on_failure=lambda: self.run_shadows(None))
            self.add_metrics("shadows", shadows.metrics)

    def live_sequences(self) -> Iterator[Sequence]:
        """Yield all that wait, run or have their grammar compiled."""
        for sequence_id in (*self.scheduler.sequence_ids, *self._preparing.sequence_ids):
            yield self._sequence(sequence_id)

    def report_progress(self, beat: Callable[[], None]) -> None:
        """Have each layer of a forward pass call `beat`."""
        self.parts.progress.beat = beat
        if self.parts.worker is not None:
            self.runner.backend.report_progress(beat)

    def watch_graphs(self, take: Callable[[ExecutionGraph], None]) -> None:
        """Have `take` called with the execution graph of each later step, before it is executed."""
        self.worker.graphs.watch(take)

    def add_metrics(self, kind: str, read: Callable[[], Any]) -> None:
        """Include a module's metrics in the snapshot, under its kind."""
        self.parts.metrics_of[kind] = read

    def _add_speculation(self) -> None:
        """Include the metrics of what drafts, if anything does."""
        speculation = self.scheduler.speculation
        for kind in ("speculation", "draft_proposer"):
            self.parts.metrics_of.pop(kind, None)
        if speculation is not None:
            self.add_metrics("speculation", speculation.metrics)
            self.add_metrics("draft_proposer", speculation.proposer_metrics)

    def _end_late(self, now_ns: int, outputs: StepTokens) -> None:
        late = self.scheduler.expired(now_ns)
        for sequence_id in [*late, *self._preparing.expired(now_ns)] if self._preparing else late:
            outputs.add(self._expire(sequence_id))

    def _must_wait(self, outputs: StepTokens) -> bool:
        """Say whether all there is to do is to wait, for a tier or a grammar, and wait a little."""
        if self.kv.num_fetches:
            self._clock.sleep_ns(_IDLE_WAIT_NS)
            return True
        if not self._preparing or self.scheduler.num_waiting:
            return False
        if not outputs:
            self._preparing.wait(_COMPILE_WAIT_S)
        return True

    def _take_prepared(self, outputs: StepTokens) -> None:
        """Queue the sequences whose grammars are compiled, and end those whose grammars are refused."""
        for sequence, error in self._preparing.prepared():
            self.scheduler.add(sequence)
            if error is not None:
                is_refused = isinstance(error, InvalidRequestError)
                told = str(error) if is_refused else self.parts.registry.describe(error)
                ended = self._end(sequence.sequence_id, "error", told)
                outputs.add(replace(ended, is_refused=is_refused))

    def _sequence(self, sequence_id: SequenceId) -> Sequence:
        source = self._preparing if sequence_id in self._preparing else self.scheduler
        return source[sequence_id]

    def _copies(self) -> Seq[KVOp]:
        pairs = self.kv.take_copies()
        return (CopyBlocks(pairs),) if pairs else ()

    def _measure(self) -> None:
        """Learn from how long the last step took."""
        self._work = None
        step = self.steps.take_last()
        if step is None or not len(step.seats):
            return
        works = [work_of(step)] if step.num_steps == 1 else [*decode_works(step.starts, step.num_steps)]
        self._work = works[-1]
        for work, took_ns in zip(works, self.steps.last_ns, strict=True):
            self.parts.cost_fit.add(work, took_ns)
            if self.scheduler.speculation is not None:
                self.scheduler.speculation.measure(step, took_ns)
            if self.kv.offload is not None:  # decides what is fetched
                self.kv.offload.measure_prefill(work.num_tokens, float(work.num_pairs), took_ns)

    def _no_room(self, sequence: Sequence) -> OutOfBlocksError:
        needed, available = self.kv.num_blocks_for(sequence.num_tokens), self.kv.available_blocks
        num_pinned = self.kv.cache.metrics().num_pinned_blocks
        return OutOfBlocksError(
            f"{needed} blocks are needed, {available} of {self.kv.total_blocks} can be had and "
            f"{num_pinned} are pinned; unpin some, or raise kv.num_blocks",
            needed=needed,
            available=available,
        )

    def _require_progress(self, planned: PlannedStep | None, *, has_advanced: bool) -> None:
        """Raise EngineError if no sequence has advanced for too long. Passes may wait for the clock."""
        decisions = self.scheduler.decisions
        is_free = planned is not None and not decisions
        if has_advanced or is_free or not self.has_unfinished():
            self._num_idle_steps = 0
            return
        now_ns = self._clock.now_ns()
        if self._num_idle_steps == 0:
            self._idle_since_ns = now_ns
        self._num_idle_steps += 1
        if self._num_idle_steps >= _MAX_IDLE_STEPS and (
            not decisions or now_ns - self._idle_since_ns >= _MAX_HELD_NS
        ):
            num_steps, self._num_idle_steps = self._num_idle_steps, 0
            whose = "the scheduler chose nothing; name another one in scheduler.name"
            if decisions:
                whose = f"passes decided: {'; '.join(map(str, decisions))}; see scheduler.passes"
            raise EngineError(
                f"no sequence advanced in {num_steps} steps while {self.scheduler.num_waiting} "
                f"wait and {self.scheduler.num_running} run: {whose}"
            )
        if decisions and planned is None:
            self._clock.sleep_ns(_IDLE_WAIT_NS)

    def _advance(self, result: StepResult, outputs: StepTokens) -> None:
        """Append the results of a collected step to the outputs, and end the sequences that are over."""
        for seat, error in result.errors.items():
            sequence = self._seats.sequences[seat]
            shown = fields(request_id=sequence.request.request_id)
            logger.error("request %s ends with an error", sequence.sequence_id, exc_info=error, extra=shown)
            outputs.add(self._fail(sequence.sequence_id, error))
        for seat, scores in result.scores.items():
            sequence = self._seats.sequences[seat]
            sequence.prompt_scores.append(scores)
            sequence.num_scored += len(scores)
            if sequence.num_scored >= sequence.num_to_score:
                self._seats.scored.discard(seat)
        if result.drafted is not None:
            self._take_drafted(result.drafted)
        runs = result.tokens
        sequence_ids = self._seats.sequence_ids.take(result.seats)
        if np.count_nonzero(runs.counts) < len(sequence_ids):
            sequence_ids = sequence_ids[runs.counts > 0]
        first = outputs.extend(sequence_ids.tolist(), runs)
        has_more = result.is_first | result.is_over
        if result.drafted is not None:
            has_more[result.drafted.rows] = True
        if result.logprobs or result.hidden_states:
            has_more |= np.isin(result.seats, [*result.logprobs, *result.hidden_states])
        if np.count_nonzero(has_more):
            is_told = runs.counts > 0
            places, ends = np.cumsum(is_told) - 1 + first, np.cumsum(runs.counts)
            for row in np.flatnonzero(has_more & is_told).tolist():
                tokens = runs.ids[ends[row] - runs.counts[row] : ends[row]].tolist()
                outputs.replace(int(places[row]), self._describe(result, row, tokens))

    def _take_drafted(self, drafted: DraftedRows) -> None:
        """Give back the blocks of refused drafts, and learn from what was accepted."""
        for _, seat, num_drafts, num_accepted in zip(*(each.tolist() for each in drafted), strict=True):
            self.kv.truncate(Seat(seat), int(self._seats.num_tokens[seat]))
            self.scheduler.log.drafted(self._seats.sequence_ids[seat], num_drafts, num_accepted)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.learn(drafted)

    def _describe(self, result: StepResult, row: int, tokens: list[int]) -> TokenOutput:
        """Return what a sequence's output says besides its tokens, and end the sequence if it is over."""
        seat = Seat(int(result.seats[row]))
        sequence: Sequence = self._seats.sequences[seat]
        prompt_scores = scheduled_ns = None
        if result.is_first[row]:
            sequence.first_token_ns = self._clock.now_ns()
            self._trace.mark_async("first token", sequence.sequence_id)
            self.kv.share_computed(sequence)
            if sequence.params.prompt_logprobs is not None:
                prompt_scores = PromptScores.joined(sequence.prompt_scores)
                sequence.prompt_scores.clear()
            scheduled_ns = sequence.scheduled_ns
        reason = stop_reason = None
        if result.is_over[row]:
            reason, stop_reason = check_stop_conditions(
                sequence.params,
                sequence.output_token_ids(),
                sequence.stop_token_ids,
                sequence.max_output_tokens,
            )
            self._finish(sequence.sequence_id, reason or "length")
        drafted = (0, 0) if result.drafted is None else result.drafted.counts_of(row)
        states = result.hidden_states.get(seat)
        return TokenOutput(
            sequence.sequence_id,
            tokens,
            reason,
            stop_reason,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            logprobs=result.logprobs.get(seat),
            prompt_scores=prompt_scores,
            hidden_states=None if states is None else states.tobytes(),
            scheduled_ns=scheduled_ns,
            num_preemptions=sequence.num_preemptions if result.is_over[row] else 0,
            num_draft_tokens=drafted[0],
            num_accepted_tokens=drafted[1],
        )

    def _fail(self, sequence_id: SequenceId, error: BaseException) -> TokenOutput:
        return self._end(sequence_id, "error", self.parts.registry.describe(error))

    def _expire(self, sequence_id: SequenceId) -> TokenOutput:
        request = self._sequence(sequence_id).request
        allowed_ms = ((request.deadline_ns or 0) - request.arrival_ns) / 1e6
        return self._end(sequence_id, "deadline", f"the deadline, {allowed_ms:.6g} ms, has passed")

    def _end(self, sequence_id: SequenceId, reason: FinishReason, message: str) -> TokenOutput:
        num_preemptions = self._sequence(sequence_id).num_preemptions
        with contained() as failure:
            self._finish(sequence_id, reason)
        if failure.error is not None:
            logger.error("request %s could not give back all its blocks", sequence_id, exc_info=failure.error)
            self._finish(sequence_id, reason)  # it has none any more
        return TokenOutput(sequence_id, finish_reason=reason, error=message, num_preemptions=num_preemptions)

    def _finish(self, sequence_id: SequenceId, reason: FinishReason) -> None:
        if sequence_id in self._preparing:  # the scheduler ends it like any other
            self.scheduler.add(self._preparing.remove(sequence_id))
        sequence = self.scheduler.finish(sequence_id, _STATUS[reason])
        finished_ns = self._clock.now_ns()
        num_output_tokens = sequence.num_output_tokens
        self._metrics.num_finished += 1
        self._metrics.num_output_tokens += num_output_tokens
        if reason in ("stop", "length"):
            self._predictions.end(sequence, finished_ns, has_stopped=reason == "stop")
        else:
            self._predictions.forget(sequence)
        if self._is_traced:
            self._trace.end_async(
                "request",
                sequence_id,
                finish_reason=reason,
                num_output_tokens=num_output_tokens,
                num_cached_tokens=sequence.num_cached_tokens or 0,
                num_preemptions=sequence.num_preemptions,
            )
        self.parts.recorder.take(sequence, reason, finished_ns)
        if self.watchers:
            self.watchers.ended(sequence, reason, finished_ns)
        if self._request_observers:
            record = RequestRecord(
                request_id=sequence.request.request_id,
                namespace=sequence.request.namespace,
                finish_reason=reason,
                num_prompt_tokens=len(sequence.request.token_ids),
                num_output_tokens=num_output_tokens,
                num_cached_tokens=sequence.num_cached_tokens or 0,
                num_preemptions=sequence.num_preemptions,
                arrival_ns=sequence.request.arrival_ns,
                first_token_ns=sequence.first_token_ns,
                finished_ns=finished_ns,
                tenant=sequence.request.tenant.name,
                priority=sequence.request.priority,
                scheduled_ns=sequence.scheduled_ns,
            )
            self._request_observers.tell(record=record)

    def _observe(self, started_ns: int, planned: PlannedStep | None) -> None:
        self._num_steps += 1 if planned is None else planned.num_steps
        self.kv.tell_events()
        num_preempted = self.scheduler.num_preemptions - self._num_preemptions_seen
        self._num_preemptions_seen += num_preempted
        num_tokens, num_steps = (0, 1) if planned is None else (planned.num_tokens, planned.num_steps)
        if num_tokens:
            self._metrics.num_computed_tokens += num_tokens
            place = bisect_left(STEP_TOKEN_BOUNDS, num_tokens // num_steps)
            self._metrics.steps_by_tokens[place] += num_steps
        if self._is_traced:
            self._trace.counter(
                "batch", tokens=num_tokens, sequences=0 if planned is None else len(planned.seats)
            )
            waiting, running = self.scheduler.num_waiting, self.scheduler.num_running
            self._trace.counter("queues", waiting=waiting, running=running)
            self._trace.counter("blocks", available=self.kv.available_blocks)
        if self._step_observers:
            record = StepRecord(
                step=self._num_steps,
                started_ns=started_ns,
                finished_ns=self._clock.now_ns(),
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting,
                num_scheduled_tokens=num_tokens,
                num_preempted=num_preempted,
                num_free_blocks=self.kv.available_blocks,
                work=self._work,
            )
            self._step_observers.tell(record=record)
        if self.watchers:
            self.watchers.stepped(self._clock.now_ns())

    @contextmanager
    def _without_exits(self) -> Iterator[None]:
        """Raise PluginError instead of SystemExit and the like, which would end the caller's program."""
        with contained(Exception) as failure:
            yield
        if failure.error is not None:
            raise PluginError(self.parts.registry.describe(failure.error)) from failure.error
