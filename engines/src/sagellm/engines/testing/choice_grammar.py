"""A grammar provider that needs no compiler: one of some texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sagellm.core import GrammarProtocol, InvalidRequestError
from sagellm.core.protocols.grammar import GrammarMetrics, StructureKind, Vocabulary

if TYPE_CHECKING:
    from sagellm.core.protocols.grammar import Words

Texts = tuple[bytes, ...]


@dataclass(eq=False)
class ChoiceState:
    """What is left of the texts that a sequence may still become, and what was before each token."""

    left: Texts
    before: list[Texts] = field(default_factory=list)


class ChoiceGrammar(GrammarProtocol[Texts, ChoiceState]):
    """Looks at every token for each mask: for small vocabularies."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._metrics = GrammarMetrics()

    def prepare(self, kind: StructureKind, text: str) -> Texts:
        """Read the texts. Raises InvalidRequestError for any other kind."""
        choices = json.loads(text) if kind == "choice" else None
        if not isinstance(choices, list) or not all(isinstance(each, str) and each for each in choices):
            self._metrics.num_refused += 1
            raise InvalidRequestError(f"{kind} is not supported; give a choice of texts")
        self._metrics.num_prepared += 1
        return tuple(each.encode() for each in choices)

    def start(self, compiled: Texts) -> ChoiceState:
        """Return the state of a new sequence."""
        self._metrics.num_started += 1
        return ChoiceState(compiled)

    def mask(self, state: ChoiceState, words: Words) -> bool:
        """Allow what begins one of the texts that are left."""
        self._metrics.num_masks += 1
        words[:] = 0
        for token_id in range(len(self._vocabulary.tokens)):
            if self._after(state, token_id):
                words[token_id // 32] |= 1 << token_id % 32
        return True

    def advance(self, state: ChoiceState, token_ids: Sequence[int]) -> int:
        """Append tokens."""
        for place, token_id in enumerate(token_ids):
            left = self._after(state, token_id)
            if not left:
                return place
            state.before.append(state.left)
            state.left = left
        return len(token_ids)

    def rollback(self, state: ChoiceState, num_tokens: int) -> None:
        """Remove tokens."""
        if num_tokens:
            state.left = state.before[-num_tokens]
            del state.before[-num_tokens:]

    def metrics(self) -> GrammarMetrics:
        """Return the counts."""
        return replace(self._metrics)

    def _after(self, state: ChoiceState, token_id: int) -> Texts:
        """Return what may follow a token, an empty text for the end; nothing if the token may not."""
        if token_id in self._vocabulary.stop_token_ids:
            return (b"",) if b"" in state.left else ()
        text = self._vocabulary.tokens[token_id]
        return tuple(each.removeprefix(text) for each in state.left if text and each.startswith(text))
