"""How the sequences in the seats draw their tokens: settings as columns, and what changes their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core import EMPTY, LogitsRequest
from sagellm.core.protocols.step import SeatArrival
from sagellm.engines.sampling.draws import Edits, filters_of
from sagellm.engines.sampling.processors.counting import SparseProcessor
from sagellm.engines.sampling.random import key_of
from sagellm.engines.sampling.rows import LogitsStates, SamplingRow
from sagellm.engines.sampling.sampler import Sampler
from sagellm.engines.sampling.sequence_penalties import SequencePenalties
from sagellm.engines.worker.masks import Words
from sagellm.engines.worker.sampled import Sampled
from sagellm.engines.worker.seat_state import SeatState

Seats = npt.NDArray[np.int32]


class RowSettings(NamedTuple):
    """How positions draw."""

    filters: npt.NDArray[np.float64]  # (positions, 5): `Filters`, and room for a number
    keys: npt.NDArray[np.uint64]  # (positions,) of the random numbers
    positions: npt.NDArray[np.uint64]  # (positions,) of the tokens in their outputs


class SparseChanges(NamedTuple):
    """What changes a sequence's logits a token at a time."""

    processors: Sequence[tuple[SparseProcessor[Any], Any]]  # and the sequence's state in each
    mask: Words | None  # of all its positions

    def edits(self, output_token_ids: npt.NDArray[np.int32]) -> list[Edits]:
        """Return the changes of the processors after an output."""
        edits = [each.edits_at(state, output_token_ids) for each, state in self.processors]
        return [each for each in edits if each is not None]


class SeatDraws:
    """The settings of each seat, read once for each sequence that takes it."""

    def __init__(self, state: SeatState, sampler: Sampler) -> None:
        num_seats = len(state.generation)
        self._state, self._sampler = state, sampler
        self._generation = np.full(num_seats, -1, np.int64)  # for which these hold:
        self._filters = np.zeros((num_seats, 5))
        self._keys = np.zeros(num_seats, np.uint64)
        self._num_prompt = np.zeros(num_seats, np.int32)
        self.num_top = np.full(num_seats, -1, np.int32)  # log-probabilities that are wanted; -1: none
        self.has_plugins = np.zeros(num_seats, np.bool_)  # logits processors that need torch
        self.needs_output = np.zeros(num_seats, np.bool_)  # its tokens, to change its logits on the host
        self.has_penalties = np.zeros(num_seats, np.bool_)
        self.changes_logits = np.zeros(num_seats, np.bool_)  # by any of these, or sparse changes
        self._is_plain = np.zeros(num_seats, np.bool_)  # asks for no more than a token
        self.sparse: list[SparseChanges | None] = [None] * num_seats
        self._penalties: list[SequencePenalties | None] = [None] * num_seats  # until they are first needed

    def learn(self, seats: Seats) -> bool:
        """Read what sequences that are new in these seats ask for; say whether all seats ask for no more
        than a token.
        """
        is_new = self._generation.take(seats) != self._state.generation.take(seats)
        if np.count_nonzero(is_new):
            for seat in set(seats[is_new].tolist()):
                self._learn(seat)
        return bool(np.count_nonzero(self._is_plain.take(seats)) == len(seats))

    def settings(self, seats: Seats, positions: npt.NDArray[np.int32]) -> RowSettings:
        """Return the settings of rows; `positions` are those of the tokens they draw, in their sequences."""
        in_output = positions - self._num_prompt.take(seats)
        return RowSettings(self._filters.take(seats, 0), self._keys.take(seats), in_output.astype(np.uint64))

    def with_changes(self, seats: Seats) -> list[int]:
        """Return which of some positions have sparse changes or penalties that a kernel makes."""
        is_changed = (self.changes_logits & ~self.has_plugins)[seats]
        return [
            index
            for index in is_changed.nonzero()[0].tolist()
            if self.sparse[seats[index]] is not None or self.has_penalties[seats[index]]
        ]

    def output(self, seat: int, place: int) -> npt.NDArray[np.int32]:
        """Return a view of a sequence's output before a place, drafts included."""
        output: npt.NDArray[np.int32] = self._state.tokens[seat, self._num_prompt[seat] : place]
        return output

    def penalties(self, seat: int, vocab_size: int) -> SequencePenalties:
        """Return the penalties of a sequence that has them."""
        penalties = self._penalties[seat]
        if penalties is None:
            arrival = self._state[seat]
            prompt = arrival.token_ids[: arrival.num_prompt]
            penalties = self._penalties[seat] = SequencePenalties(arrival.params, prompt, vocab_size)
        return penalties

    def rows(self, sampled: Sampled, masks: dict[int, Words]) -> list[SamplingRow]:
        """Return positions as the sampler takes them, with the masks of some of them."""
        return [
            self._row(seat, place, masks.get(index))
            for index, (seat, place) in enumerate(
                zip(sampled.seats.tolist(), sampled.places.tolist(), strict=True)
            )
        ]

    def _row(self, seat: int, place: int, mask: Words | None) -> SamplingRow:
        arrival = self._state[seat]
        row = SamplingRow(
            params=arrival.params,
            seed=arrival.seed,
            position=place - arrival.num_prompt,
            prompt_token_ids=EMPTY,
            output_token_ids=(),
            states=self._states(seat),
            mask=mask,
        )
        if row.is_changed:
            row.prompt_token_ids = arrival.token_ids[: arrival.num_prompt]
            row.output_token_ids = self._state.output_before(seat, place)
        return row

    def _states(self, seat: int) -> LogitsStates:
        states = self._state.logits_states[seat]
        if states is None:
            request = _logits_request(self._state[seat])
            states = self._state.logits_states[seat] = self._sampler.start(request)
        return states

    def _learn(self, seat: int) -> None:
        arrival = self._state[seat]
        params = arrival.params
        used = [(self._sampler.processors[which], state) for which, state in self._states(seat)]
        sparse = [(each, state) for each, state in used if isinstance(each, SparseProcessor)]
        self.has_plugins[seat] = has_plugins = len(sparse) < len(used)
        self.needs_output[seat] = has_plugins or any(each.needs_output(state) for each, state in sparse)
        self.has_penalties[seat] = params.has_penalties
        self.num_top[seat] = -1 if params.logprobs is None else params.logprobs
        self.changes_logits[seat] = changes = bool(used) or params.has_penalties
        self._is_plain[seat] = not changes and params.logprobs is None
        self.sparse[seat] = _sparse_changes(sparse) if sparse and not has_plugins else None
        self._penalties[seat] = None
        self._filters[seat, :4] = filters_of(params)
        self._keys[seat], self._num_prompt[seat] = key_of(arrival.seed), arrival.num_prompt
        self._generation[seat] = self._state.generation[seat]


def _sparse_changes(processors: Sequence[tuple[SparseProcessor[Any], Any]]) -> SparseChanges:
    masks = [mask for each, state in processors if (mask := each.allowed(state)) is not None]
    return SparseChanges(processors, np.bitwise_and.reduce(masks) if masks else None)


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
