"""Computes one step: forward pass, sampling, verification of drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from sagellm.core import EngineError, StepInput, StepOutput
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.engine import PromptScores
from sagellm.core.protocols.step import CopyBlocks, HostBuffers, KVOp, ReadBlocks, Runs, TokenMasks
from sagellm.engines.sampling.draws import DeviceDraw, HostDraw, Logits
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.worker.host_tokens import HostTokens, LaunchedStep, StepDraws
from sagellm.engines.worker.model_runner import ModelRunner
from sagellm.engines.worker.row_draws import KernelDraw, SamplerDraw, as_tensor
from sagellm.engines.worker.seat_draws import SeatDraws
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.step_graphs import StepGraphs


class Worker:
    """Runs the model and draws tokens for its seats, inside the context that `around` returns.

    A failure in the forward pass or in sampling is an error of every row of the step; the core resubmits the
    rows in halves until the failing sequence is alone. An earlier failure, such as one of `kv_ops`, is
    raised.

    Tokens are drawn by sampled position: with a `draw` on the host as part of the step, with one on a device
    there, from where the next step takes them, and without any by the sampler. What a row asks for beside a
    token, such as a mask, penalties, drafts or log-probabilities, costs that row.
    """

    def __init__(  # noqa: PLR0913
        self,
        runner: ModelRunner,
        sampler: Sampler,
        state: SeatState,
        *,
        graphs: StepGraphs | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        draw: HostDraw | DeviceDraw | None = None,
        buffers: HostBuffers | None = None,
    ) -> None:
        self.runner, self.sampler, self._state = runner, sampler, state
        self._buffers = HostBuffers() if buffers is None else buffers
        self._tokens = _tokens_of(draw, sampler, state)
        self._waiting: dict[int, LaunchedStep] = {}  # steps with rows that wait for masks, by number
        self._in_flight: deque[int] = deque()  # numbers of the steps that are launched, but not finished
        self.graphs = graphs or StepGraphs(state, runner.layouts[0])
        self._around = around

    def compute(self, step: StepInput) -> StepOutput:
        """Compute a step. Raises what the forward backend raises for `kv_ops`."""
        return self.launch(step)()

    def launch(self, step: StepInput) -> Callable[[], StepOutput]:
        """Begin a step. What the returned function raises and returns is as in `compute`.

        Rows in `late_masks` must be drawn before the next step is begun.
        """
        self._state.update(step)
        if step.new_blocks is not None:
            self.runner.note_blocks(step.new_blocks)
        for node, operation in zip(self.graphs.begin(step), step.kv_ops, strict=True):
            with self.graphs.transfer(node):
                self._carry_out(operation)
        if not len(step.seats):
            none = StepOutput(step=step.step, tokens=Runs(step.seats, step.seats), num_accepted=step.seats)
            return lambda: none
        with contained() as failure, self._around():
            launched = self._forward(step)
            self._in_flight.append(step.step)
            if launched.waiting is not None:
                self._waiting[step.step] = launched
            return partial(self._finish, launched)
        output = StepOutput.failed(step, _taken(failure))
        return lambda: output

    def add_masks(self, step: int, masks: TokenMasks) -> None:
        """Draw the rows of a launched step that waited for these masks.

        A failure is one of the step's rows. Masks of a step that failed, or waits for none, are ignored.
        """
        launched = self._waiting.pop(step, None)
        if launched is None:
            return
        with contained() as failure, self._around(), self.graphs.sample():
            self._tokens.add_masks(launched, masks)
        if failure.error is not None:
            launched.output, launched.waiting = StepOutput.failed(launched.step, _taken(failure)), None

    def _forward(self, step: StepInput) -> LaunchedStep:
        if self._waiting:
            numbers = ", ".join(map(str, self._waiting))
            raise EngineError(f"step {step.step} was submitted before the masks of step {numbers}")
        with self.graphs.trace.span("prepare"):
            batch = self.runner.prepare_inputs(step, self._state)
            self._tokens.fill_in(step, batch.input_ids)
        with self.graphs.forward():
            logits = self.runner.execute_model(batch)
        with self.graphs.sample():
            scores: dict[int, PromptScores] = {}
            if step.scored:
                num_drawn = len(logits) - sum(each.stop - each.start for each in step.scored)
                scores, logits = self._score(step, logits[num_drawn:]), logits[:num_drawn]
            hidden = None if batch.hidden is None else batch.hidden.values[0]
            return self._tokens.launch(step, logits, scores, hidden)

    def _finish(self, launched: LaunchedStep) -> StepOutput:
        while self._in_flight and self._in_flight[0] <= launched.step.step:
            self._in_flight.popleft()
        self._waiting.pop(launched.step.step, None)
        with contained() as failure:
            return self._tokens.finish(launched)
        return StepOutput.failed(launched.step, _taken(failure))

    def _carry_out(self, operation: KVOp) -> None:
        backend = self.runner.backend
        if isinstance(operation, CopyBlocks):
            backend.copy_blocks(operation.pairs)
        elif isinstance(operation, ReadBlocks):
            into = self._buffers.views(operation.into)
            backend.read_blocks(operation.block_ids, into, num_in_flight=len(self._in_flight))
        else:
            backend.write_blocks(operation.block_ids, self._buffers.views(operation.data))

    def _score(self, step: StepInput, logits: Logits) -> dict[int, PromptScores]:
        scores: dict[int, PromptScores] = {}
        begin = 0
        for row, start, stop, num_top in ((e.row, e.start, e.stop, e.num_top) for e in step.scored):
            end = begin + stop - start
            token_ids = self._state.tokens[step.seats[row], start + 1 : stop + 1].tolist()
            scores[row] = self.sampler.score(as_tensor(logits[begin:end]), token_ids, num_top)
            begin = end
        return scores


def _tokens_of(draw: HostDraw | DeviceDraw | None, sampler: Sampler, state: SeatState) -> StepDraws:
    draws = SeatDraws(state, sampler)
    if draw is None:
        return HostTokens(SamplerDraw(sampler, draws), state)
    if isinstance(draw, HostDraw):
        return HostTokens(KernelDraw(draw, sampler, draws), state)
    from sagellm.engines.worker.late_tokens import LateTokens  # for devices alone

    return LateTokens(draw, sampler, draws, state)


def _taken(failure: contained) -> BaseException:
    """Take a failure's error: nothing else may keep its frames."""
    error, failure.error = failure.error, None
    assert error is not None, "something failed"
    return error
