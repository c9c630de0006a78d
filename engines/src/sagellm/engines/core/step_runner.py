"""Runs the model and the sampler on what a step scheduled; a fault there belongs to one sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sagellm.core import LogitsRequest, SequenceId, TraceWriter, get_logger
from sagellm.engines.core.model_runner import ModelRunner
from sagellm.engines.core.sequence import ScheduledSequence, Sequence
from sagellm.engines.sampling.rows import SampledToken, SamplingRow
from sagellm.engines.sampling.sampler import Sampler

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)


@dataclass(slots=True)
class StepResults:
    """What became of each sequence; one that only computed a part of its prompt may be in none of these."""

    tokens: dict[SequenceId, SampledToken] = field(default_factory=dict)
    scores: dict[SequenceId, list[SampledToken]] = field(default_factory=dict)  # of prompt tokens
    errors: dict[SequenceId, BaseException] = field(default_factory=dict)

    def __or__(self, other: StepResults) -> StepResults:
        return StepResults(self.tokens | other.tokens, self.scores | other.scores, self.errors | other.errors)


class StepRunner:
    """Computes the tokens of scheduled sequences.

    After a failure the step is run again by halves until the failing sequence is alone. This is sound because
    KV writes are idempotent, random numbers are keyed by seed and position, and logits processors
    keep nothing of a step. Model and sampler run inside the context that `around` returns.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        trace: TraceWriter,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._trace = trace
        self._around = around

    def run(self, scheduled: list[ScheduledSequence]) -> StepResults:
        """Compute what is scheduled. Raises nothing but KeyboardInterrupt."""
        if not scheduled:
            return StepResults()
        try:
            with self._around():
                return self._forward_and_sample(scheduled)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if len(scheduled) == 1:
                sequence_id = scheduled[0].sequence.sequence_id
                logger.error("request %s ends with an error", sequence_id, exc_info=error)
                return StepResults(errors={sequence_id: error})
        middle = len(scheduled) // 2
        return self.run(scheduled[:middle]) | self.run(scheduled[middle:])

    def _forward_and_sample(self, scheduled: list[ScheduledSequence]) -> StepResults:
        with self._trace.span("prepare"):
            batch = self._runner.prepare_inputs(scheduled)
        with self._trace.span("forward"):
            logits = self._runner.execute_model(batch)
        with self._trace.span("sample"):
            sampled = [entry.sequence for entry in scheduled if entry.is_sampled]
            rows = [self._row(sequence) for sequence in sampled]
            tokens = self._sampler.sample(logits[: len(rows)], rows)
            return StepResults(
                tokens={sequence.sequence_id: token for sequence, token in zip(sampled, tokens, strict=True)},
                scores=self._score(logits[len(rows) :], scheduled),
            )

    def _score(
        self, logits: torch.Tensor, scheduled: list[ScheduledSequence]
    ) -> dict[SequenceId, list[SampledToken]]:
        scores: dict[SequenceId, list[SampledToken]] = {}
        begin = 0
        for entry in scheduled:
            sequence, scored = entry.sequence, entry.scored if entry.sequence.num_to_score else range(0)
            if not scored:
                continue
            end = begin + len(scored)
            token_ids = sequence.tokens_between(scored.start + 1, scored.stop + 1)
            num_top = sequence.params.prompt_logprobs or 0
            scores[sequence.sequence_id] = self._sampler.score(logits[begin:end], token_ids, num_top)
            begin = end
        return scores

    def _row(self, sequence: Sequence) -> SamplingRow:
        if sequence.logits_states is None:
            sequence.logits_states = self._sampler.start(_logits_request(sequence))
        return SamplingRow(
            params=sequence.params,
            seed=sequence.seed,
            position=len(sequence.output_token_ids),
            prompt_token_ids=sequence.request.token_ids,
            output_token_ids=sequence.output_token_ids,
            states=sequence.logits_states,
        )


def _logits_request(sequence: Sequence) -> LogitsRequest:
    params = sequence.params
    return LogitsRequest(
        prompt_token_ids=sequence.request.token_ids,
        logit_bias=params.logit_bias or {},
        min_tokens=params.min_tokens,
        stop_token_ids=sequence.stop_token_ids,
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        bad_words_token_ids=tuple(tuple(word) for word in params.bad_words_token_ids),
        extra_args=params.extra_args or {},
    )
