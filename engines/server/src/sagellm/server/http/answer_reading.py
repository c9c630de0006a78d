"""How the answers of one request are read: for reasoning, for tool calls, or not at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sagellm.core.protocols.parsers import (
    AnswerParser,
    AnswerPart,
    NullAnswerParser,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from sagellm.engines.parsers.answers import ReasoningThenCalls
from sagellm.engines.parsers.choice import ChosenParsers
from sagellm.engines.parsers.structure import after, after_reasoning, with_tokens
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.structured_outputs import StructuredOutputs
from sagellm.server.http.errors import invalid, unsupported
from sagellm.server.http.tools import Offer


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """The parsers of a request's answers."""

    parsers: ChosenParsers
    offer: Offer | None
    prompt_end: str = ""  # the last of the prompt's text, if reasoning is looked for
    shows_reasoning: bool = True
    removed: re.Pattern[str] | None = None  # from the text, before it is parsed

    def start(self) -> AnswerReader:
        """Return a reader of one answer."""
        reasoning = self.parsers.reasoning_parser
        parser: AnswerParser = NullAnswerParser()
        if self.offer is not None and self.parsers.tool_parser is not None:
            parser = self.parsers.tool_parser.start(self.offer.callable)
        if reasoning is not None:
            parser = ReasoningThenCalls(reasoning.start(self.prompt_end), parser)
        return AnswerReader(self, parser)

    def params(self, params: SamplingParams, *, has_grammar: bool) -> SamplingParams:
        """Return the sampling that the answers need: with tags that are special tokens, and constrained.

        Calls that are demanded are always constrained, others if the engine `has_grammar`. What an answer
        must match comes after its reasoning. Raises APIError if a format cannot be constrained.
        """
        if self.parsers.token_ids:
            params = replace(params, skip_special_tokens=False)
        offer, parser = self.offer, self.parsers.tool_parser
        if params.structured_outputs is not None:
            if offer is not None and offer.is_required:
                raise invalid(
                    "tool_choice", "tool_choice: a call cannot match response_format; leave one out"
                )
            return self._after_reasoning(params)
        if offer is None or parser is None or not (offer.is_required or offer.is_strict or has_grammar):
            return params
        structure = parser.structure(
            offer.callable, is_required=offer.is_required, is_parallel=offer.is_parallel
        )
        if structure is None:
            if not (offer.is_required or offer.is_strict):
                return params
            name = "tool_choice" if offer.is_required else "tools"
            raise unsupported(name, "the model's tool parser cannot constrain calls", remedy="let it decide")
        structure = with_tokens(structure, self.parsers.token_ids)
        if (tags := self._tags()) is not None:
            structure = after(structure, tags, self.parsers.token_ids, is_optional=not offer.is_required)
        return replace(params, structured_outputs=StructuredOutputs(structural_tag=structure))

    def _tags(self) -> tuple[str, str] | None:
        reasoning = self.parsers.reasoning_parser
        return None if reasoning is None else reasoning.tags(self.prompt_end)

    def _after_reasoning(self, params: SamplingParams) -> SamplingParams:
        """Have what follows the reasoning match, instead of the whole answer."""
        asked, tags = params.structured_outputs, self._tags()
        if tags is None or not isinstance(asked, StructuredOutputs):
            return params
        return replace(params, structured_outputs=after_reasoning(asked, tags, self.parsers.token_ids))


class AnswerReader:
    """Reads one answer, from its text so far."""

    def __init__(self, reading: AnswerReading, parser: AnswerParser) -> None:
        self._reading, self._parser = reading, parser
        self._num_read = 0
        self.num_calls = 0

    def read(self, text: str, *, is_over: bool) -> list[AnswerPart]:
        """Return what became certain, given the whole text so far."""
        new = text[self._num_read :]
        self._num_read = len(text)
        if self._reading.removed is not None:
            new = self._reading.removed.sub("", new)
        parts: Sequence[AnswerPart] = self._parser.feed(new)
        if is_over:
            parts = [*parts, *self._parser.finish()]
        return [part for part in parts if self._is_shown(part)]

    def _is_shown(self, part: AnswerPart) -> bool:
        offer = self._reading.offer
        if isinstance(part, ToolCallStart | ToolCallArguments):
            is_first = part.call_index == 0 or offer is None or offer.is_parallel
            self.num_calls += is_first and isinstance(part, ToolCallStart)
            return is_first
        return not isinstance(part, Reasoning) or self._reading.shows_reasoning
