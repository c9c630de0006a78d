"""A step's outputs by sequence, kept as columns until they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence as Seq
from typing import overload

from sagellm.core import SequenceId, TokenOutput
from sagellm.core.protocols.step import Runs


class StepTokens(Seq[TokenOutput]):
    """Outputs of a step. A sequence that just continues has only its id and its tokens."""

    def __init__(self) -> None:
        self._sequence_ids: list[SequenceId] = []
        self._tokens: list[int] = []
        self._ends: list[int] = []
        self._outputs: dict[int, TokenOutput] = {}  # of those with more to say

    def __len__(self) -> int:
        return len(self._sequence_ids)

    @overload
    def __getitem__(self, place: int) -> TokenOutput: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenOutput]: ...
    def __getitem__(self, place: int | slice) -> TokenOutput | list[TokenOutput]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if place < 0:
            place += len(self)
        if (output := self._outputs.get(place)) is not None:
            return output
        begin = self._ends[place - 1] if place else 0
        return TokenOutput(self._sequence_ids[place], self._tokens[begin : self._ends[place]])

    def __iter__(self) -> Iterator[TokenOutput]:
        begin = 0
        for place, (sequence_id, end) in enumerate(zip(self._sequence_ids, self._ends, strict=True)):
            output = self._outputs.get(place) if self._outputs else None
            yield TokenOutput(sequence_id, self._tokens[begin:end]) if output is None else output
            begin = end

    @property
    def described(self) -> Iterable[TokenOutput]:
        """The outputs that say more than tokens, such as those of sequences that begin or end."""
        return self._outputs.values()

    def add(self, output: TokenOutput) -> None:
        """Append one output as it is."""
        self._outputs[len(self)] = output
        self._sequence_ids.append(output.sequence_id)
        self._ends.append(len(self._tokens))

    def extend(self, sequence_ids: list[SequenceId], runs: Runs) -> int:
        """Append the non-empty runs of these sequences; return the index of the first one."""
        first, begin = len(self), len(self._tokens)
        self._sequence_ids += sequence_ids
        self._tokens += runs.ids.tolist()
        if len(sequence_ids) == len(runs.ids):  # a token each
            self._ends += range(begin + 1, len(self._tokens) + 1)
        else:
            self._ends += (runs.counts.cumsum()[runs.counts > 0] + begin).tolist()
        return first

    def replace(self, place: int, output: TokenOutput) -> None:
        """Replace the entry of a sequence by an output that says more."""
        self._outputs[place] = output
