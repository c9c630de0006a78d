"""The step loop: schedule, run the model, sample, update."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from sagellm.core import (
    STEP_TOKEN_BOUNDS,
    BlockId,
    EngineError,
    EngineMetrics,
    EngineProtocol,
    EngineSequence,
    FinishReason,
    LifetimePredictorProtocol,
    NullTrace,
    OutOfBlocksError,
    PluginError,
    PluginRegistry,
    PredictionRequest,
    RequestRecord,
    RequestStatus,
    Runtime,
    SequenceId,
    StepRecord,
    TokenOutput as TokenOutput,
    TraceWriter,
    get_logger,
)
from sagellm.engines.attention.progress import ProgressHook
from sagellm.engines.core.kv_cache_manager import KVCacheManager
from sagellm.engines.core.kv_saves import KVSaves
from sagellm.engines.core.model_runner import ModelRunner
from sagellm.engines.core.observers import Observers
from sagellm.engines.core.scheduler import Scheduler
from sagellm.engines.core.sequence import ScheduledSequence, Sequence
from sagellm.engines.core.step_runner import StepResults, StepRunner
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.sampling.stop import check_stop_conditions

logger = get_logger(__name__)

_MAX_IDLE_STEPS = 1000
"""Steps in a row without work, while sequences wait, after which the scheduler counts as broken."""

_FETCH_WAIT_NS = 100_000
"""Between two looks at the tiers while there is nothing else to do."""

_STATUS: dict[FinishReason, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
}


@dataclass(frozen=True, kw_only=True)
class CoreParts:
    """The assembled modules that a core drives."""

    scheduler: Scheduler
    kv: KVCacheManager
    saves: KVSaves
    runner: ModelRunner
    sampler: Sampler
    predictor: LifetimePredictorProtocol
    registry: PluginRegistry
    runtime: Runtime
    trace: TraceWriter = field(default_factory=NullTrace)
    metrics_of: dict[str, Callable[[], Any]] = field(default_factory=dict)
    around_step: Callable[[], AbstractContextManager[object]] = nullcontext  # forward pass and sampling
    progress: ProgressHook = field(default_factory=ProgressHook)


class EngineCore(EngineProtocol):
    """Runs sequences to their end, one step for all of them at a time.

    A fault in the forward pass or in sampling belongs to one sequence, which StepRunner finds, and
    only that one ends with the reason "error".

    A fault anywhere else in a step leaves open what happened to which sequence, so all of them end
    with the reason "error", and the next request finds the engine empty. What an observer or the
    predictor raises is logged, and nothing else happens. SystemExit of a module is a fault like any
    other; of all that is raised only KeyboardInterrupt passes.
    """

    def __init__(self, parts: CoreParts) -> None:
        self.parts = parts
        self.scheduler, self.kv, self.runner = parts.scheduler, parts.kv, parts.runner
        self._steps = StepRunner(parts.runner, parts.sampler, parts.trace, parts.around_step)
        self._trace = parts.trace
        self._is_traced = not isinstance(parts.trace, NullTrace)
        self._clock = parts.runtime.clock
        self._metrics = EngineMetrics()
        self._first_token_ns: dict[SequenceId, int] = {}
        self._num_steps = self._num_idle_steps = 0
        self._num_preemptions_seen = 0
        self._request_observers = Observers(parts.registry, "sagellm_request_finished")
        self._step_observers = Observers(parts.registry, "sagellm_step_finished")
        if kv_observers := Observers(parts.registry, "sagellm_kv_events"):
            self.kv.observe(lambda events: kv_observers.tell(events=events))

    def step(self) -> list[TokenOutput]:
        """Compute one step and return what it did to each sequence that it sampled or ended."""
        with self._trace.span("step"):
            return self._step()

    def _step(self) -> list[TokenOutput]:
        started_ns = self._clock.now_ns()
        scheduled: list[ScheduledSequence] = []
        outputs: list[TokenOutput] = []
        try:
            self.kv.poll()
            with self._trace.span("schedule"):
                scheduled = self.scheduler.schedule()
            if not scheduled and self.kv.num_fetches:
                self._clock.sleep_ns(_FETCH_WAIT_NS)
                return outputs
            if not scheduled and (head := self.scheduler.shut_out()) is not None:
                outputs.append(self._fail(head.sequence_id, self._no_room(head)))
            self._require_progress(scheduled)
            self.runner.copy_blocks(self.kv.take_copies())
            results = self._run(scheduled)
            with self._trace.span("advance"):
                for entry in scheduled:
                    output = self._advance(entry, results, started_ns)
                    if output is not None:
                        outputs.append(output)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            described = self.parts.registry.describe(error)
            logger.exception("a step failed; every request ends with an error: %s", described)
            outputs += [self._fail(sequence_id, error) for sequence_id in self.scheduler.sequence_ids]
            self.kv.take_copies()  # what they were for has ended
        self._observe(started_ns, scheduled)
        return outputs

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence."""
        if not isinstance(sequence, Sequence):
            sequence = Sequence.of(
                sequence.request,
                sequence.sequence_id,
                params=sequence.params,
                seed=sequence.seed,
                stop_token_ids=sequence.stop_token_ids,
            )
        request = sequence.request
        asked = PredictionRequest(
            sequence_id=sequence.sequence_id, token_ids=request.token_ids, max_length=request.max_tokens
        )
        with self._guessing():
            prediction = self.parts.predictor.predict(asked)
            sequence.schedule.predicted_remaining_tokens = prediction.remaining_length
        self._metrics.num_prompt_tokens += len(request.token_ids)
        self.scheduler.add(sequence)
        if self._is_traced:
            num_prompt_tokens = len(request.token_ids)
            self._trace.begin_async("request", sequence.sequence_id, num_prompt_tokens=num_prompt_tokens)

    def abort(self, sequence_ids: Iterable[SequenceId], *, finish_reason: FinishReason = "abort") -> None:
        """End sequences before their time; those that have ended already are passed over."""
        with self._without_exits():
            for sequence_id in sequence_ids:
                if sequence_id in self.scheduler:
                    self._finish(sequence_id, finish_reason)
            self.kv.tell_events()

    def warm_up(self, sequence: Sequence) -> None:
        """Compute a prompt and one token after it, past the scheduler, the cache and all that counts.

        Only before the first request: the KV goes into the first blocks, which nobody holds yet. Raises
        EngineError if the model fails.
        """
        num_tokens = sequence.num_tokens
        sequence.block_ids = [BlockId(each) for each in range(self.kv.num_blocks_for(num_tokens + 1))]
        for start, num_new in ((0, num_tokens), (num_tokens, 1)):
            results = self._steps.run([ScheduledSequence(sequence, start, num_new)])
            if (error := results.errors.get(sequence.sequence_id)) is not None:
                raise EngineError(f"the engine failed at its first step: {error}") from error
            sequence.output_token_ids.append(results.tokens[sequence.sequence_id].token_id)

    def has_unfinished(self) -> bool:
        """Say whether a sequence waits or runs."""
        return self.scheduler.num_waiting + self.scheduler.num_running > 0

    def close(self) -> None:
        """End all sequences, and let go of files and connections; nothing is asked of it any more."""
        with self._without_exits():
            try:
                self.abort(list(self.scheduler.sequence_ids))
                self.parts.saves.close()
            finally:
                self._trace.close()
                self.kv.close()

    def metrics(self) -> EngineMetrics:
        """Return a snapshot with the metrics of every module."""
        with self._without_exits():
            modules = {kind: read() for kind, read in self.parts.metrics_of.items()}
        return replace(
            self._metrics,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_preemptions=self.scheduler.num_preemptions,
            steps_by_tokens=self._metrics.steps_by_tokens.copy(),
            modules=modules,
        )

    def report_progress(self, beat: Callable[[], None]) -> None:
        """Have each layer of a forward pass call `beat`."""
        self.parts.progress.beat = beat

    def add_metrics(self, kind: str, read: Callable[[], Any]) -> None:
        """Have a module's metrics in the snapshot, under its kind."""
        self.parts.metrics_of[kind] = read

    def _run(self, scheduled: list[ScheduledSequence]) -> StepResults:
        """Compute a step, and note how long its prefill took where that decides what is fetched."""
        if self.kv.offload is None:
            return self._steps.run(scheduled)
        started_ns = self._clock.now_ns()
        results = self._steps.run(scheduled)
        context = sum(entry.num_tokens * (entry.start + entry.num_tokens / 2) for entry in scheduled)
        num_tokens = sum(entry.num_tokens for entry in scheduled)
        self.kv.offload.prefill.measure(num_tokens, context, self._clock.now_ns() - started_ns)
        return results

    def _no_room(self, sequence: Sequence) -> OutOfBlocksError:
        needed, available = self.kv.num_blocks_for(sequence.num_tokens), self.kv.available_blocks
        num_pinned = self.kv.cache.metrics().num_pinned_blocks
        return OutOfBlocksError(
            f"{needed} blocks are needed, {available} of {self.kv.total_blocks} can be had and "
            f"{num_pinned} are pinned; unpin some, or raise kv.num_blocks",
            needed=needed,
            available=available,
        )

    def _require_progress(self, scheduled: list[ScheduledSequence]) -> None:
        self._num_idle_steps = 0 if scheduled or not self.has_unfinished() else self._num_idle_steps + 1
        if self._num_idle_steps >= _MAX_IDLE_STEPS:
            self._num_idle_steps = 0
            raise EngineError(
                f"the scheduler chose nothing in {_MAX_IDLE_STEPS} steps while {self.scheduler.num_waiting} "
                f"sequences wait and {self.scheduler.num_running} run; name another one in scheduler.name"
            )

    def _advance(self, entry: ScheduledSequence, results: StepResults, started_ns: int) -> TokenOutput | None:
        sequence = entry.sequence
        sequence_id = sequence.sequence_id
        if sequence.scheduled_ns is None:
            sequence.scheduled_ns = started_ns
        if sequence_id in results.errors:
            return self._fail(sequence_id, results.errors[sequence_id])
        sequence.schedule.num_computed_tokens = entry.stop
        if sequence_id in results.scores:
            sequence.prompt_scores += results.scores[sequence_id]
            sequence.num_scored = entry.scored.stop
        token = results.tokens.get(sequence_id)
        if token is None:
            return None
        prompt_scores = scheduled_ns = None
        if not sequence.output_token_ids:
            self._first_token_ns[sequence_id] = self._clock.now_ns()
            self._trace.mark_async("first token", sequence_id)
            self.kv.share_computed(sequence)
            prompt_scores, sequence.prompt_scores = sequence.prompt_scores, []
            scheduled_ns = sequence.scheduled_ns
        sequence.output_token_ids.append(token.token_id)
        sequence.schedule.num_tokens += 1
        reason, stop_reason = check_stop_conditions(
            sequence.params, sequence.output_token_ids, sequence.stop_token_ids, sequence.request.max_tokens
        )
        if reason is not None:
            self._finish(sequence_id, reason)
        return TokenOutput(
            sequence_id,
            token,
            reason,
            stop_reason,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            prompt_scores=prompt_scores,
            scheduled_ns=scheduled_ns,
        )

    def _fail(self, sequence_id: SequenceId, error: BaseException) -> TokenOutput:
        try:
            self._finish(sequence_id, "error")
        except KeyboardInterrupt:
            raise
        except BaseException:
            logger.exception("request %s could not give back all its blocks", sequence_id)
            self._finish(sequence_id, "error")  # it has none any more
        message = self.parts.registry.describe(error)
        return TokenOutput(sequence_id, None, finish_reason="error", error=message)

    def _finish(self, sequence_id: SequenceId, reason: FinishReason) -> None:
        sequence = self.scheduler.finish(sequence_id, _STATUS[reason])
        finished_ns = self._clock.now_ns()
        num_output_tokens = len(sequence.output_token_ids)
        self._metrics.num_finished += 1
        self._metrics.num_output_tokens += num_output_tokens
        if reason in ("stop", "length"):
            with self._guessing():
                self.parts.predictor.update(
                    sequence_id=sequence_id,
                    actual_length=num_output_tokens,
                    actual_time=(finished_ns - sequence.request.arrival_ns) / 1e9,
                )
        first_token_ns = self._first_token_ns.pop(sequence_id, None)
        if self._is_traced:
            self._trace.end_async(
                "request",
                sequence_id,
                finish_reason=reason,
                num_output_tokens=num_output_tokens,
                num_cached_tokens=sequence.num_cached_tokens or 0,
                num_preemptions=sequence.num_preemptions,
            )
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
                first_token_ns=first_token_ns,
                finished_ns=finished_ns,
            )
            self._request_observers.tell(record=record)

    def _observe(self, started_ns: int, scheduled: list[ScheduledSequence]) -> None:
        self._num_steps += 1
        self.kv.tell_events()
        num_preempted = self.scheduler.num_preemptions - self._num_preemptions_seen
        self._num_preemptions_seen += num_preempted
        num_tokens = sum([entry.num_tokens for entry in scheduled])
        if num_tokens:
            self._metrics.num_computed_tokens += num_tokens
            self._metrics.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        if self._is_traced:
            self._trace.counter("batch", tokens=num_tokens, sequences=len(scheduled))
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
            )
            self._step_observers.tell(record=record)

    @contextmanager
    def _without_exits(self) -> Iterator[None]:
        """Raise PluginError for SystemExit and the like, which would end the caller's program."""
        try:
            yield
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginError(self.parts.registry.describe(error)) from error

    @contextmanager
    def _guessing(self) -> Iterator[None]:
        """Log what the lifetime predictor raises: it only guesses."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            described = self.parts.registry.describe(error)
            logger.exception("the lifetime predictor failed; the engine goes on: %s", described)
