"""What has been said, and the prompt that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from sagellm.core import InvalidRequestError
from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.text.chat_messages import ChatMessage
from sagellm.engines.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, including the token ids that the model wrote."""

    question: ChatMessage
    answer: ChatMessage


@dataclass(slots=True)
class Conversation:
    """The turns so far.

    A prompt begins with the tokens of the previous prompt and its answer, whose KV is cached.
    """

    template: ChatTemplate
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    files: set[Path] = field(default_factory=set)  # it was saved to or loaded from these; resolved

    def messages(self, num_dropped: int = 0) -> list[ChatMessage]:
        """Return what has been said, without the oldest turns."""
        system = [] if self.system is None else [ChatMessage("system", self.system)]
        said = chain.from_iterable((turn.question, turn.answer) for turn in self.turns[num_dropped:])
        return [*system, *said]

    def render(self, question: str, *, num_dropped: int = 0) -> list[int]:
        """Return the prompt that asks a question next. Raises InvalidRequestError."""
        return self.template.render([*self.messages(num_dropped), ChatMessage("user", question)])

    def num_excess_turns(self, question: str, max_tokens: int) -> int:
        """Return how many of the oldest turns to drop for the next prompt to fit.

        Drops more than necessary, down to half of `max_tokens`, but keeps the latest turn if it fits: the
        cache has nothing behind a dropped turn, so dropping one each time would recompute every prompt.
        """
        fits = None
        for num_dropped in range(len(self.turns)):
            num_tokens = len(self.render(question, num_dropped=num_dropped))
            if num_tokens <= max_tokens:
                fits = num_dropped
            if num_tokens <= max_tokens // 2:
                break
        return len(self.turns) if fits is None else fits

    def load(self, messages: Sequence[ChatMessage]) -> str | None:
        """Continue with these messages instead; return the question at their end that has no answer yet.

        Raises InvalidRequestError unless questions and answers alternate, perhaps after a system message.
        """
        system = messages[0].content if messages[0].role == "system" else None
        said = messages[0 if system is None else 1 :]
        for index, message in enumerate(said):
            role = "assistant" if index % 2 else "user"
            if message.role != role:
                raise InvalidRequestError(
                    f"message {len(messages) - len(said) + index} has the role {message.role!r}; "
                    f"it must be {role!r}"
                )
        self.system = system
        self.turns = [Turn(*pair) for pair in zip(said[::2], said[1::2], strict=False)]
        return said[-1].content if len(said) % 2 else None

    def add(self, question: str, output: RequestOutput) -> None:
        """Add a turn, even if its answer was interrupted."""
        self.turns.append(Turn(ChatMessage("user", question), answer_message(output)))


def answer_message(output: RequestOutput) -> ChatMessage:
    """Return the answer as a message. The template adds the token that ended it."""
    [answer] = output.outputs
    token_ids = list(answer.token_ids)
    if isinstance(answer.stop_reason, str):
        token_ids = []  # the text was cut in the middle of them
    elif answer.finish_reason == "stop":
        token_ids = token_ids[:-1]
    return ChatMessage("assistant", answer.text, token_ids=token_ids)
