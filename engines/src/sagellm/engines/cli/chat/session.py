"""A session: questions and commands in, answers out, until it is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sagellm.core import EngineError, InvalidInputError
from sagellm.engines.cli.chat.answer import stream_answer
from sagellm.engines.cli.chat.commands import is_command, run_command
from sagellm.engines.cli.chat.conversation import Conversation
from sagellm.engines.cli.chat.reasoning_view import ReasoningView
from sagellm.engines.cli.chat.terminal import Terminal
from sagellm.engines.held_interrupts import HeldInterrupts
from sagellm.engines.parsers.choice import PROMPT_END_TOKENS, ChosenParsers
from sagellm.engines.parsers.structure import after_reasoning
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.sampling.params import SamplingParams
from sagellm.engines.sampling.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from sagellm.engines import LLMEngine

_ROOM_SHARE = 4  # an answer is left this part (1 ÷ 4) of the context, or its max_tokens if fewer


@dataclass(slots=True)
class ChatSession:
    """A conversation on a terminal; in a pipe each line is a question, and only answers are printed."""

    engine: LLMEngine
    params: SamplingParams
    conversation: Conversation
    terminal: Terminal
    parsers: ChosenParsers = field(default_factory=ChosenParsers)

    def run(self) -> None:
        """Converse until the end of the input. Raises a question's error only in a pipe."""
        while (line := self.terminal.read()) is not None:
            question: str | None = line
            if self.terminal.is_interactive and is_command(line):
                outcome = run_command(line, self.conversation, self.params)
                self.params = outcome.params or self.params
                if outcome.leaves:
                    return
                if outcome.told:
                    self.terminal.tell(outcome.told)
                question = outcome.question
                if question is not None and (self.params.temperature == 0 or self.params.seed is not None):
                    self.terminal.whisper(
                        "the same prompt gets the same answer again: the temperature is 0, or a seed is set"
                    )
            if question is None:
                continue
            try:
                self._answer(question)
            except (InvalidInputError, EngineError) as error:
                if not self.terminal.is_interactive:
                    raise
                self.terminal.tell(f"Error: {error}")

    @property
    def max_context(self) -> int:
        """Maximum tokens of a prompt and its answer together, by the model's limit and the KV blocks."""
        kv = self.engine.config.kv
        capacity = (kv.num_blocks or 0) * kv.block_size + 1  # the last token is never written to KV
        return min(self.engine.max_model_len, capacity)

    def _answer(self, question: str) -> None:
        if self.terminal.is_interactive:
            with HeldInterrupts() as held:
                try:
                    output = self._stream(question, held.take)
                finally:
                    held.take()  # it came when the answer had ended
        else:
            output = self._stream(question, lambda: False)
        self.terminal.end_answer()
        [answer] = output.outputs
        if answer.error is not None:
            raise EngineError(f"the answer failed: {answer.error}")
        if answer.token_ids:
            self.conversation.add(question, output)
        self.terminal.whisper(describe(output))

    def _stream(self, question: str, is_stopped: Callable[[], bool]) -> RequestOutput:
        token_ids = self._fitting_prompt(question)
        left = max(1, self.max_context - len(token_ids))
        params = replace(self.params, max_tokens=min(self.params.max_tokens or left, left))
        parser = self.parsers.reasoning_parser
        if parser is None:
            return stream_answer(
                self.engine, token_ids, params, write=self.terminal.write, is_stopped=is_stopped
            )
        tokenizer = self.engine.light_tokenizer
        prompt_end = "" if tokenizer is None else tokenizer.decode(token_ids[-PROMPT_END_TOKENS:])
        asked, tags = params.structured_outputs, parser.tags(prompt_end)
        if isinstance(asked, StructuredOutputs) and tags is not None:
            after = after_reasoning(asked, tags, self.parsers.token_ids)
            params = replace(params, structured_outputs=after)
        shown = ReasoningView(parser.start(prompt_end), self.terminal)
        output = stream_answer(self.engine, token_ids, params, write=shown.write, is_stopped=is_stopped)
        shown.end()
        return output

    def _fitting_prompt(self, question: str) -> list[int]:
        """Return the prompt, without the oldest turns if they leave no room, and report that first."""
        share = self.max_context // _ROOM_SHARE
        room = min(share, self.params.max_tokens or share)
        token_ids = self.conversation.render(question)
        if not self.conversation.turns or len(token_ids) <= self.max_context - room:
            return token_ids
        excess = self.conversation.num_excess_turns(question, self.max_context - room)
        turns = "turn is" if excess == 1 else f"{excess} turns are"
        self.terminal.tell(
            f"the conversation has {len(token_ids)} tokens of the {self.max_context} that there is room for; "
            f"the oldest {turns} left out from here on"
        )
        del self.conversation.turns[:excess]
        return self.conversation.render(question)


def describe(output: RequestOutput) -> str:
    """Say in one line how long an answer took, and how it ended if not by itself."""
    metrics, [answer] = output.metrics, output.outputs
    parts = [f"{len(answer.token_ids)} tokens"]
    if metrics.ttft is not None:
        parts.append(f"first after {metrics.ttft * 1e3:.0f} ms")
    if metrics.throughput is not None:
        parts.append(f"{metrics.throughput:.1f} tokens/s")
    parts.append(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached")
    if metrics.num_draft_tokens:
        parts.append(f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens accepted")
    endings = {"length": "cut off by --max-tokens or the context", "abort": "stopped"}
    if answer.finish_reason in endings:
        parts.append(endings[answer.finish_reason])
    return f"[{', '.join(parts)}]"
