"""Log-probabilities of tokens beside their texts, packed: an answer may have millions."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, overload

from sagellm.core import EngineError
from sagellm.core.protocols.engine import PromptScores
from sagellm.engines.text.detokenizer import NO_TEXT, Decoders, TokenText, TokenwiseDetokenizer

T = TypeVar("T")
_NO_SCORE: tuple[tuple[float, ...], int | None, tuple[int, ...]] = (), None, ()


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token, natural logarithm, and what the token adds to the text in its place.

    `rank` is 1 for the most likely token; listed tokens of equal probability are ordered by id. A character
    whose bytes are spread over several tokens is the text of the last one, the others have none of it;
    `token_bytes` are each token's own. They are empty for tokens that are left out of the text, such as
    special ones, whose `decoded_token` is how the vocabulary spells them.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str = ""
    token_bytes: bytes = b""


class Position(NamedTuple):
    """The token at a position, and the most likely ones there, best first, which may include it.

    `values` are their log-probabilities; the first token of a prompt has none, as it follows nothing.
    """

    token_ids: Sequence[int]
    values: Sequence[float]
    rank: int | None  # of the token itself
    texts: Sequence[TokenText]

    def by_id(self) -> dict[int, Logprob]:
        """Return the log-probabilities by token, the token itself first."""
        ranks = (self.rank, *range(1, len(self.token_ids)))
        columns = zip(self.token_ids, self.values, ranks, self.texts, strict=True)
        return {token_id: Logprob(value, rank, *text) for token_id, value, rank, text in columns}


class PendingScores:
    """Scores of a sequence's tokens, until the detokenizer knows what these add to the text.

    Without a detokenizer they add nothing.
    """

    def __init__(self, detokenizer: TokenwiseDetokenizer | None) -> None:
        self._detokenizer = detokenizer
        self._pending: deque[Position] = deque()

    def add(
        self,
        token_ids: Sequence[int],
        values: Sequence[float],
        rank: int | None,
        *,
        is_left_out: bool = False,
    ) -> None:
        """Take a token's score and those of others in its place, before the detokenizer takes the token.

        A token that is left out of the text is not given to the detokenizer, and no other follows it.
        """
        texts: list[TokenText] = [NO_TEXT] * len(token_ids)
        if self._detokenizer is not None:
            first = 0 if is_left_out else 1
            texts[first:] = self._detokenizer.instead(token_ids[first:])
        if is_left_out:
            texts[0] = TokenText(texts[0].text, b"")
        # Packed, as a whole prompt of byte tokens may wait for its end.
        self._pending.append(Position(array("i", token_ids), array("d", values), rank, texts))

    def settled(self) -> Iterator[Position]:
        """Yield the positions whose texts became known since the last call, in order."""
        if self._detokenizer is None:
            yield from self.finish()
            return
        for text in self._detokenizer.settled():
            yield _with_text(self._pending.popleft(), text)

    def finish(self) -> Iterator[Position]:
        """Yield all that are left, with the texts known; after the detokenizer has finished, or failed."""
        if self._detokenizer is not None:
            yield from self.settled()
        while self._pending:
            position = self._pending.popleft()
            yield _with_text(position, position.texts[0])


def _with_text(position: Position, text: TokenText) -> Position:
    """Return a position whose token adds this text."""
    token_ids, token_id = position.token_ids, position.token_ids[0]
    texts = [
        text if each == token_id else known for each, known in zip(token_ids, position.texts, strict=True)
    ]
    return Position(token_ids, position.values, position.rank, texts)


class _LazySequence(Sequence[T]):
    """A sequence whose entries are built when they are looked at. Equal to any sequence of equal ones."""

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._entry(each) for each in range(*index.indices(len(self)))]
        return self._entry(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    @abstractmethod
    def _entry(self, index: int) -> T:
        """Return an entry that exists."""


class Logprobs(_LazySequence[dict[int, Logprob]]):
    """A mapping per token of an output: the token itself, first, and the most likely ones, best first.

    It grows with the output. 20 bytes for each log-probability.
    """

    def __init__(self) -> None:
        # Entries [ends[i], ends[i + 1]) are position i's.
        self._ids, self._values, self._texts = array("i"), array("d"), list[TokenText]()
        self._ends, self._ranks = array("q", [0]), array("i")  # rank 0: unknown
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, position: Position) -> None:
        """Add a position that has values."""
        self._ids.extend(position.token_ids)
        self._values.extend(position.values)
        self._texts.extend(position.texts)
        self._ends.append(len(self._ids))
        self._ranks.append(position.rank or 0)
        self._length += 1

    def snapshot(self) -> Logprobs:
        """Return what is there now, without a copy: what is there never changes."""
        snapshot = Logprobs()
        vars(snapshot).update(vars(self))
        return snapshot

    def positions(self, start: int = 0) -> Iterator[Position]:
        """Yield the positions from a given one on."""
        for index in range(start, self._length):
            entries = slice(self._ends[index], self._ends[index + 1])
            rank = self._ranks[index] or None
            yield Position(self._ids[entries], self._values[entries], rank, self._texts[entries])

    def _entry(self, index: int) -> dict[int, Logprob]:
        return next(self.positions(index)).by_id()


class PromptLogprobs(_LazySequence[dict[int, Logprob] | None]):
    """A mapping per token of a prompt, as of an output; None for the first token, which follows nothing.

    Texts are decoded when they are looked at.
    """

    def __init__(self, token_ids: Sequence[int], scores: PromptScores, decoders: Decoders) -> None:
        if len(scores) != len(token_ids) - 1:
            raise EngineError(
                f"the engine scored {len(scores)} tokens of a prompt of {len(token_ids)}; it must score all "
                f"but the first"
            )
        self._token_ids, self._scores, self._decoders = token_ids, scores, decoders

    def __len__(self) -> int:
        return len(self._token_ids)

    def positions(self, *, skip_special_tokens: bool = False) -> Iterator[Position | None]:
        """Yield the positions, and None after each token, so that the caller can pause.

        The texts are those in the prompt's text with or without special tokens. Decodes once or twice for
        each log-probability; nothing is kept.
        """
        decoder = self._decoders.get(skip_special_tokens=skip_special_tokens)
        detokenizer = None if decoder is None else TokenwiseDetokenizer(decoder)
        pending = PendingScores(detokenizer)
        for index, token_id in enumerate(self._token_ids):
            values, rank, others = self._scores[index - 1] if index else _NO_SCORE
            pending.add((token_id, *others), values, rank)
            if detokenizer is not None:
                detokenizer.append((token_id,))
            yield from pending.settled()
            yield None
        if detokenizer is not None:
            detokenizer.finish()
        yield from pending.finish()

    @cached_property
    def _entries(self) -> list[dict[int, Logprob] | None]:
        known = (position for position in self.positions() if position is not None)
        return [position.by_id() if position.values else None for position in known]

    def _entry(self, index: int) -> dict[int, Logprob] | None:
        return self._entries[index]
