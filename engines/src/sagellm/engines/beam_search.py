"""Beam search over an engine: each step generates one token for every beam, and keeps the best continuations.

The KV of a beam is found in the prefix cache by its successors, so a step computes about a token for each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from sagellm.core import EngineError, InvalidRequestError
from sagellm.engines.config.shown import shown
from sagellm.engines.sampling.checks import MAX_LOGPROBS, Parameter, integer, number
from sagellm.engines.sampling.params import SamplingParams

if TYPE_CHECKING:
    from sagellm.engines.llm_engine import LLMEngine
    from sagellm.engines.requests.outputs import RequestOutput
    from sagellm.engines.requests.prompts import Prompt

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""A beam offers twice as many continuations, as some of them end."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How wide and how far to search. Names and defaults are vLLM's.

    Sequences are ranked by their log-probability ÷ (tokens generated ^ `length_penalty`). Raises
    InvalidRequestError.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        integer("beam_width", self.beam_width, Parameter(help="", type=int, low=1, high=MAX_BEAM_WIDTH))
        integer("max_tokens", self.max_tokens, Parameter(help="", type=int, low=1, high=2**31 - 1))
        number("length_penalty", self.length_penalty, Parameter(help="", type=float, low=-10, high=10))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos is {shown(self.ignore_eos)}; it must be True or False")


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchSequence:
    """A sequence that was found: the tokens of prompt and output, and the text of them all."""

    tokens: list[int]
    cum_logprob: float  # of the output
    text: str | None = None
    finish_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchOutput:
    """What was found for one prompt, best first, `beam_width` sequences or fewer."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True, kw_only=True)
class _Search:
    """The search for one prompt. Its beams are all of the same length."""

    params: BeamSearchParams
    num_prompt: int
    num_left: int  # tokens that may still be generated
    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)

    def extend(self, scores: Sequence[dict[int, float]], end_ids: Collection[int]) -> None:
        """Take the likely next tokens of each beam, with their log-probabilities, and keep the best beams."""
        grown: list[BeamSearchSequence] = []
        for beam, next_tokens in zip(self.beams, scores, strict=True):
            for token_id, logprob in next_tokens.items():
                total = beam.cum_logprob + logprob
                if token_id in end_ids:
                    self.ended.append(replace(beam, cum_logprob=total, finish_reason="stop"))
                else:
                    grown.append(BeamSearchSequence(tokens=[*beam.tokens, token_id], cum_logprob=total))
        grown.sort(key=lambda beam: -beam.cum_logprob)
        self.num_left -= 1
        self.beams = grown[: self.params.beam_width]
        if not self.num_left:
            self.ended += [replace(beam, finish_reason="length") for beam in self.beams]
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """Return what has ended, best first."""
        return sorted(self.ended, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - self.num_prompt + (sequence.finish_reason == "stop")
        return sequence.cum_logprob / float(length**self.params.length_penalty)


def beam_search(
    engine: LLMEngine, prompts: Sequence[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Search for the likeliest continuations of each prompt. Raises InvalidRequestError."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequestError(f"params is {shown(params)}; it must be BeamSearchParams")
    processor = engine.driver.input
    whole = SamplingParams(max_tokens=params.max_tokens)
    searches = [
        _Search(
            params=params,
            num_prompt=len(request.token_ids),
            num_left=request.max_tokens,
            beams=[BeamSearchSequence(tokens=request.token_ids.tolist(), cum_logprob=0.0)],
        )
        for request in (processor.process_request(prompt, whole).request for prompt in prompts)
    ]
    one_token = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, ignore_eos=True, detokenize=False
    )
    end_ids = frozenset() if params.ignore_eos else processor.limits.eos_token_ids
    while live := [search for search in searches if search.beams]:
        beams: list[Prompt] = [beam.tokens for search in live for beam in search.beams]
        scores = iter([_scores(output) for output in engine.generate(beams, one_token)])
        for search in live:
            search.extend([next(scores) for _ in search.beams], end_ids)
    return [
        BeamSearchOutput(
            sequences=[
                replace(sequence, text=processor.decode_tokens(sequence.tokens)) for sequence in search.best()
            ]
        )
        for search in searches
    ]


def _scores(output: RequestOutput) -> dict[int, float]:
    """Return the log-probabilities of the likely first tokens. Raises EngineError if there are none."""
    found = output.outputs[0]
    if not found.logprobs:
        raise EngineError(found.error or f"a beam ended without a token ({found.finish_reason})")
    return {token_id: each.logprob for token_id, each in found.logprobs[0].items()}
