"""Computes one step: forward pass, sampling, verification of drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core import EMPTY, LogitsRequest, StepInput, StepOutput
from sagellm.core.plugins.failure import contained
from sagellm.core.protocols.engine import PromptScores, SampledToken
from sagellm.core.protocols.step import CopyBlocks, HostBuffers, KVOp, ReadBlocks, Runs, SeatArrival
from sagellm.engines.sampling.draws import Draw, HostDraw
from sagellm.engines.sampling.rows import LogitsStates, SamplingRow
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.worker.late_tokens import LateStep, LateTokens, Places, output_of
from sagellm.engines.worker.model_runner import ModelRunner
from sagellm.engines.worker.seat_draws import SeatDraws
from sagellm.engines.worker.seat_state import SeatState
from sagellm.engines.worker.step_graphs import StepGraphs

Ints = npt.NDArray[np.int32]


class _Draw(NamedTuple):
    """A sampled row of a step, and its rows of the logits: one more than it has drafts."""

    row: int
    seat: int
    first_position: int  # of the token that the first of its logits draws
    drafts: list[int]


class Worker:
    """Runs the model and the sampler over its seats, inside the context that `around` returns.

    A failure in the forward pass or in sampling is an error of every row of the step; the core resubmits the
    rows in halves until the failing sequence is alone. An earlier failure, such as one of `kv_ops`, is
    raised.

    With a `draw`, a launched step whose rows ask for nothing but a token leaves the tokens on the device,
    from where the next step takes them. Any other step waits for those in flight, since penalties, say, need
    all tokens on the host. A draw on the host is made as part of the step.
    """

    def __init__(  # noqa: PLR0913
        self,
        runner: ModelRunner,
        sampler: Sampler,
        state: SeatState,
        *,
        graphs: StepGraphs | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        draw: Draw | None = None,
        buffers: HostBuffers | None = None,
    ) -> None:
        self.runner, self.sampler, self._state = runner, sampler, state
        self._buffers = HostBuffers() if buffers is None else buffers
        self._seat_draws = SeatDraws(state, self._processor_states)
        self._host_draw = draw if isinstance(draw, HostDraw) else None
        self._late: LateTokens | None = None
        if draw is not None and self._host_draw is None:
            self._late = LateTokens(draw, self._seat_draws, state, runner.device)
        self._in_flight: deque[LateStep] = deque()
        self.graphs = graphs or StepGraphs(state, runner.layouts[0])
        self._around = around

    def compute(self, step: StepInput) -> StepOutput:
        """Compute a step. Raises what the forward backend raises for `kv_ops`."""
        return self.launch(step)()

    def launch(self, step: StepInput) -> Callable[[], StepOutput]:
        """Begin a step. What the returned function raises and returns is as in `compute`."""
        self._state.update(step)
        for node, operation in zip(self.graphs.begin(step), step.kv_ops, strict=True):
            with self.graphs.transfer(node):
                self._carry_out(operation)
        if not len(step.seats):
            none = StepOutput(step=step.step, tokens=Runs(step.seats, step.seats), num_accepted=step.seats)
            return lambda: none
        with contained() as failure, self._around():
            rows = step.is_sampled.nonzero()[0]
            if self._late is not None:
                if self._seat_draws.can_draw(step, step.seats[rows]):
                    return self._forward_and_draw(step, rows, self._late)
                self._settle(self._late)
            if self._host_draw is not None and self._seat_draws.can_draw(step, step.seats[rows]):
                output = self._forward_and_choose(step, rows, self._host_draw)
            else:
                output = self._forward_and_sample(step)
        if failure.error is not None:
            output = StepOutput.failed(step, failure.error)
            failure.error = None
        return lambda: output

    def _processor_states(self, seat: int) -> LogitsStates:
        states = self._state.logits_states[seat]
        if states is None:
            request = _logits_request(self._state[seat])
            states = self._state.logits_states[seat] = self.sampler.start(request)
        return states

    def _forward_and_choose(self, step: StepInput, rows: Places, draw: HostDraw) -> StepOutput:
        with self.graphs.trace.span("prepare"):
            batch = self.runner.prepare_inputs(step, self._state, ())
        with self.graphs.forward():
            logits = self.runner.execute_model(batch)
        with self.graphs.sample():
            seats, positions = step.seats[rows], (step.starts + step.num_new)[rows]
            ids = draw.choose(logits, *self._seat_draws.settings(seats, positions)).astype(np.int32)
            output = output_of(step, ids)
            if not output.errors:
                self._state.tokens[seats, positions] = ids
            return output

    def _forward_and_draw(self, step: StepInput, rows: Places, late: LateTokens) -> Callable[[], StepOutput]:
        with self.graphs.trace.span("prepare"):
            batch = self.runner.prepare_inputs(step, self._state, ())
            if self._in_flight:
                late.fill_in(step, batch.input_ids)
        with self.graphs.forward():
            logits = self.runner.execute_model(batch)
        with self.graphs.sample():
            launched = late.launch(step, rows, logits)
        self._in_flight.append(launched)
        return partial(self._finish, launched, late)

    def _finish(self, launched: LateStep, late: LateTokens) -> StepOutput:
        with contained() as failure:
            output = late.finish(launched)
        if failure.error is not None:
            output = StepOutput.failed(launched.step, failure.error)
            failure.error = None
        if launched in self._in_flight:
            self._in_flight.remove(launched)
        return output

    def _settle(self, late: LateTokens) -> None:
        """Wait for all steps in flight, so that the host has every token."""
        for launched in list(self._in_flight):
            self._finish(launched, late)

    def _carry_out(self, operation: KVOp) -> None:
        backend = self.runner.backend
        if isinstance(operation, CopyBlocks):
            backend.copy_blocks(operation.pairs)
        elif isinstance(operation, ReadBlocks):
            backend.read_blocks(operation.block_ids, self._buffers.views(operation.into))
        else:
            backend.write_blocks(operation.block_ids, self._buffers.views(operation.data))

    def _forward_and_sample(self, step: StepInput) -> StepOutput:
        draws = self._draws(step)
        with self.graphs.trace.span("prepare"):
            batch = self.runner.prepare_inputs(step, self._state, [len(draw.drafts) for draw in draws])
        with self.graphs.forward():
            logits = self.runner.execute_model(batch)
        with self.graphs.sample():
            num_drawn = sum(len(draw.drafts) + 1 for draw in draws)
            output = self._sample(step, draws, logits[:num_drawn])
            return StepOutput(
                step=step.step,
                tokens=output.tokens,
                num_accepted=output.num_accepted,
                logprobs=output.logprobs,
                scores=self._score(step, logits[num_drawn:]),
            )

    def _draws(self, step: StepInput) -> list[_Draw]:
        rows = np.flatnonzero(step.is_sampled)
        seats, ends = step.seats[rows].tolist(), (step.starts + step.num_new)[rows].tolist()
        drafts: Sequence[list[int]] = [[]] * len(rows)
        if step.drafts is not None:
            runs = step.drafts.lists()
            drafts = [runs[row] for row in rows]
        return [
            _Draw(row, seat, end - len(ids), ids)
            for row, seat, end, ids in zip(rows.tolist(), seats, ends, drafts, strict=True)
        ]

    def _sample(self, step: StepInput, draws: Sequence[_Draw], logits: torch.Tensor) -> StepOutput:
        """Draw a token at each of the logits and keep, for each row, those up to the first rejected draft.

        A draft is accepted if it equals the token drawn in its place, so the output is the same as without
        drafts.
        """
        drawn = self.sampler.sample(logits, [each for draw in draws for each in self._rows(draw)])
        counts = np.zeros(len(step.seats), np.int32)
        kept: list[SampledToken] = []
        logprobs: dict[int, list[SampledToken]] = {}
        begin = 0
        for row, seat, position, drafts in draws:
            tokens = drawn[begin : begin + len(drafts) + 1]
            begin += len(tokens)
            num_accepted = 0
            while num_accepted < len(drafts) and tokens[num_accepted].token_id == drafts[num_accepted]:
                num_accepted += 1
            tokens = tokens[: num_accepted + 1]
            self._state.tokens[seat, position : position + len(tokens)] = [each.token_id for each in tokens]
            kept += tokens
            counts[row] = len(tokens)
            if self._state[seat].params.logprobs is not None:
                logprobs[row] = tokens
        ids = np.fromiter((each.token_id for each in kept), np.int32, len(kept))
        return StepOutput(
            step=step.step,
            tokens=Runs(ids, counts),
            num_accepted=np.maximum(counts - 1, 0),
            logprobs=logprobs,
        )

    def _rows(self, draw: _Draw) -> list[SamplingRow]:
        seat, arrival = draw.seat, self._state[draw.seat]
        states = self._processor_states(seat)
        first = draw.first_position
        rows = []
        for position in range(first, first + len(draw.drafts) + 1):
            row = SamplingRow(
                params=arrival.params,
                seed=arrival.seed,
                position=position - arrival.num_prompt,
                prompt_token_ids=EMPTY,
                output_token_ids=(),
                states=states,
            )
            if row.is_changed:
                row.prompt_token_ids = arrival.token_ids[: arrival.num_prompt]
                row.output_token_ids = self._state.output_before(seat, position)
            rows.append(row)
        return rows

    def _score(self, step: StepInput, logits: torch.Tensor) -> dict[int, PromptScores]:
        scores: dict[int, PromptScores] = {}
        begin = 0
        for row, start, stop, num_top in ((e.row, e.start, e.stop, e.num_top) for e in step.scored):
            end = begin + stop - start
            token_ids = self._state.tokens[step.seats[row], start + 1 : stop + 1].tolist()
            scores[row] = self.sampler.score(logits[begin:end], token_ids, num_top)
            begin = end
        return scores


def _logits_request(arrival: SeatArrival) -> LogitsRequest:
    params = arrival.params
    return LogitsRequest(
        prompt_token_ids=arrival.token_ids[: arrival.num_prompt],
        logit_bias=params.logit_bias or {},
        min_tokens=params.min_tokens,
        stop_token_ids=arrival.stop_token_ids,
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        bad_words_token_ids=tuple(tuple(word) for word in params.bad_words_token_ids),
        extra_args=params.extra_args or {},
    )
