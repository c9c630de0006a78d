"""What every draft proposer must do. Subclass `DraftProposerContract` and override `make`."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from sagellm.core.namespace import Namespace
from sagellm.core.protocols.draft_proposer import DraftProposerMetrics, DraftProposerProtocol
from sagellm.core.protocols.step import Runs, Seat
from sagellm.testing.cost import least_cpu_ns, slowness

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]

_HERE, _THERE = Namespace("a"), Namespace("b")


def ints(*values: int) -> Ints:
    """Return an array (values,) int32."""
    import numpy as np

    return np.array(values, np.int32)


def runs_of(*runs: list[int]) -> Runs:
    """Return runs of tokens."""
    return Runs(ints(*(token for run in runs for token in run)), ints(*map(len, runs)))


class DraftProposerContract:
    """The contract of DraftProposerProtocol as tests. Needs numpy, as the arrays of a step do."""

    vocab_size = 97
    num_seats = 8
    max_row_us = 500.0  # of CPU time for a draft, of a batch of 8 with 2,000 tokens each, on a server of 2023
    max_token_us = 100.0  # the same for a token that is told

    def make(self) -> DraftProposerProtocol:
        """Return a fresh proposer."""
        raise NotImplementedError

    def text(self, seed: int, size: int) -> list[int]:
        """Return tokens in which runs return."""
        rng = Random(seed)
        phrases = [[rng.randrange(self.vocab_size) for _ in range(rng.randint(3, 9))] for _ in range(6)]
        tokens: list[int] = []
        while len(tokens) < size:
            tokens += rng.choice(phrases)
        return tokens[:size]

    def arrive(
        self, proposer: DraftProposerProtocol, seat: int, tokens: list[int], namespace: Namespace = _HERE
    ) -> None:
        """Have a sequence arrive, the first half of which is its prompt."""
        proposer.arrived(Seat(seat), ints(*tokens), -(-len(tokens) // 2), namespace)

    def propose(self, proposer: DraftProposerProtocol, most: dict[int, int]) -> list[list[int]]:
        """Return a draft for each seat, after checks that hold for every answer."""
        import numpy as np

        seats, numbers = ints(*most), ints(*most.values())
        found = proposer.propose(seats, numbers)
        assert isinstance(found, Runs)
        assert seats.tolist() == list(most)
        assert numbers.tolist() == list(most.values())
        for each in (found.ids, found.counts):
            assert isinstance(each, np.ndarray)
            assert each.ndim == 1
            assert each.dtype.kind in "iu"
        assert found.counts.shape == seats.shape
        assert ((found.counts >= 0) & (found.counts <= numbers)).all()
        assert int(found.counts.sum()) == len(found.ids)
        drafts = found.lists()
        assert all(0 <= token < self.vocab_size for draft in drafts for token in draft)
        return drafts

    def everything(self, proposer: DraftProposerProtocol) -> list[list[list[int]]]:
        """Tell and ask a few hundred times in random order; return all answers."""
        rng = Random(2)
        here: set[int] = set()
        answers = []
        for number in range(300):
            seat = rng.randrange(self.num_seats)
            if seat not in here:
                tokens = self.text(number % 5, rng.randint(1, 60))
                self.arrive(proposer, seat, tokens, rng.choice([_HERE, _THERE]))
                here.add(seat)
            elif rng.random() < 0.2:
                proposer.departed(Seat(seat), is_over=rng.random() < 0.7)
                here.remove(seat)
            chosen = sorted(rng.sample(sorted(here), rng.randint(0, len(here))))
            told = [self.text(rng.randrange(5), rng.randint(1, 4)) for _ in chosen]
            proposer.extended(ints(*chosen), runs_of(*told))
            asked = {each: rng.randint(1, 9) for each in sorted(here) if rng.random() < 0.8}
            answers.append(self.propose(proposer, asked))
        return answers

    def test_random_calls_get_drafts_that_can_be(self) -> None:
        """Of at most the wanted length, in the vocabulary of what was told."""
        self.everything(self.make())

    def test_a_new_proposer_can_be_asked_about_nothing(self) -> None:
        """A step may have no row that wants a draft."""
        proposer = self.make()
        proposer.extended(ints(), runs_of())
        assert self.propose(proposer, {}) == []

    def test_a_short_sequence_may_arrive(self) -> None:
        """Of one token, of which nothing is known."""
        proposer = self.make()
        self.arrive(proposer, 0, [5])
        self.propose(proposer, {0: 4})
        proposer.extended(ints(0), runs_of([6]))
        self.propose(proposer, {0: 4})

    def test_the_same_question_has_the_same_answer(self) -> None:
        """Until something else is told, alone and beside others."""
        proposer = self.make()
        for seat in range(self.num_seats):
            self.arrive(proposer, seat, self.text(seat, 80))
        together = self.propose(proposer, dict.fromkeys(range(self.num_seats), 6))
        assert self.propose(proposer, dict.fromkeys(range(self.num_seats), 6)) == together
        for seat, draft in enumerate(together):
            assert self.propose(proposer, {seat: 6}) == [draft]

    def test_tokens_told_at_once_or_one_by_one_are_the_same(self) -> None:
        """A sequence that was preempted arrives with all that it had."""
        one, other = self.make(), self.make()
        tokens = self.text(3, 90)
        num_prompt = len(tokens) // 2
        one.arrived(Seat(0), ints(*tokens), num_prompt, _HERE)
        other.arrived(Seat(0), ints(*tokens[:num_prompt]), num_prompt, _HERE)
        for token in tokens[num_prompt:-20]:
            other.extended(ints(0), runs_of([token]))
        other.extended(ints(0), runs_of(tokens[-20:]))
        assert self.propose(one, {0: 8}) == self.propose(other, {0: 8})

    def test_what_it_was_given_may_change_afterwards(self) -> None:
        """Arrays are the caller's."""
        proposer, tokens = self.make(), ints(*self.text(1, 60))
        proposer.arrived(Seat(0), tokens, 30, _HERE)
        more = runs_of(self.text(1, 5))
        proposer.extended(ints(0), more)
        before = self.propose(proposer, {0: 8})
        tokens[:] = more.ids[:] = 0
        assert self.propose(proposer, {0: 8}) == before

    def test_a_seat_has_one_sequence_after_another(self) -> None:
        """Nothing of one that was aborted shows in the next, and a departure may be told twice."""
        proposer, fresh = self.make(), self.make()
        self.arrive(proposer, 3, self.text(1, 80))
        for _ in range(2):
            proposer.departed(Seat(3), is_over=False)
        for each in (proposer, fresh):
            self.arrive(each, 3, self.text(2, 40))
        assert self.propose(proposer, {3: 8}) == self.propose(fresh, {3: 8})

    def test_namespaces_share_nothing(self) -> None:
        """What one holds, or held, does not show in the drafts of another."""
        proposer, fresh = self.make(), self.make()
        for seat in range(3):
            self.arrive(proposer, seat, self.text(1, 80), _THERE)
        for seat in range(2):
            proposer.departed(Seat(seat), is_over=True)
        begun = self.text(1, 80)[:20]
        for each in (proposer, fresh):
            self.arrive(each, 5, begun, _HERE)
        assert self.propose(proposer, {5: 8}) == self.propose(fresh, {5: 8})

    def test_two_proposers_share_nothing(self) -> None:
        """Equal calls get equal answers, whatever another one was told."""
        first, second = self.make(), self.make()
        self.everything(first)
        assert self.everything(second) == self.everything(self.make())

    def test_metrics_count_what_was_told_and_asked(self) -> None:
        """And nothing is kept of sequences that were aborted."""
        proposer = self.make()
        assert isinstance(proposer.metrics(), DraftProposerMetrics)
        assert proposer.metrics().num_asked == 0
        for seat in range(3):
            self.arrive(proposer, seat, self.text(seat, 50))
        drafts = self.propose(proposer, {0: 5, 1: 5, 2: 5})
        found = proposer.metrics()
        assert (found.num_sequences, found.num_asked) == (3, 3)
        assert found.num_drafts == sum(map(bool, drafts))
        assert found.num_proposed == sum(map(len, drafts))
        for seat in range(3):
            proposer.departed(Seat(seat), is_over=False)
        assert proposer.metrics().num_kept_tokens == 0

    def test_it_costs_little(self) -> None:
        """A draft, and a token that is told."""
        proposer = self.make()
        seats = range(self.num_seats)
        for seat in seats:
            self.arrive(proposer, seat, self.text(seat, 2000))
        rows, most = ints(*seats), ints(*[8] * len(seats))
        tokens: Any = runs_of(*[[7]] * len(seats))
        ask_ns = least_cpu_ns(lambda: proposer.propose(rows, most), 10)
        tell_ns = least_cpu_ns(lambda: proposer.extended(rows, tokens), 10)
        assert ask_ns / 1e3 / len(seats) < self.max_row_us * slowness()
        assert tell_ns / 1e3 / len(seats) < self.max_token_us * slowness()
