"""The lengths of drafts, for steps and acceptances that are known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sagellm.engines.engine_core.draft_lengths import MAX_DRAFT, DraftLengths

PLAIN_NS = 10_000_000


class Machine:
    """Steps that take what a formula says, and drafts that are accepted with known probabilities."""

    def __init__(self, lengths: DraftLengths, *, fixed: float, cost: float, noise: float = 0.05) -> None:
        self.lengths, self.fixed, self.cost, self.noise = lengths, fixed, cost, noise
        self.chance = random.Random(3)
        self.num_tokens = self.took_ns = self.num_drafted = 0
        self.longest: list[int] = []

    def run(self, alphas: list[float], num_steps: int) -> float:
        """Return tokens for each time that a step without drafts takes."""
        self.num_tokens = self.took_ns = self.num_drafted = 0
        self.longest = []
        seats = np.arange(len(alphas))
        for _ in range(num_steps):
            wanted = self.lengths.wanted(seats, 0.0)
            counts = np.zeros(len(alphas), np.int32) if wanted is None else wanted
            accepted = np.array(
                [self._accepted(*each) for each in zip(alphas, counts, strict=True)], np.int32
            )
            took = 1 + (self.fixed if counts.any() else 0) + self.cost * counts.sum()
            took_ns = round(PLAIN_NS * took * (1 + self.noise * self.chance.random()))
            rows = np.flatnonzero(counts)
            if len(rows):
                self.lengths.learn(seats[rows], counts[rows], accepted[rows])
                self.num_drafted += 1
                self.longest.append(int(counts.max()))
            self.lengths.measure(len(alphas), int(counts.sum()), took_ns)
            self.num_tokens += len(alphas) + int(accepted.sum())
            self.took_ns += took_ns
        return self.num_tokens / (self.took_ns / PLAIN_NS)

    def _accepted(self, alpha: float, count: int) -> int:
        number = 0
        while number < count and self.chance.random() < alpha:
            number += 1
        return number


def bound(alpha: float, fixed: float, cost: float) -> tuple[float, int]:
    """Return the best tokens in the time of a plain step, and the length that gives them."""
    return max(
        ((1 - alpha ** (k + 1)) / ((1 - alpha) * (1 + (fixed if k else 0) + cost * k)), k)
        for k in range(MAX_DRAFT + 1)
    )


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(("fixed", "cost"), [(0.0, 0.02), (0.05, 0.05), (0.1, 0.2), (0.5, 0.02), (0.0, 0.5)])
def test_one_sequence_gets_most_of_the_bound(alpha, fixed, cost):
    machine = Machine(DraftLengths(4), fixed=fixed, cost=cost)
    machine.run([alpha], 150)
    best, _ = bound(alpha, fixed, cost)
    assert machine.run([alpha], 800) >= 0.9 * best / 1.025  # the noise lengthens all steps


@pytest.mark.parametrize(("alpha", "fixed", "cost"), [(0.05, 0.1, 0.1), (0.5, 0.1, 0.9), (0.3, 3.0, 0.05)])
def test_where_drafts_do_not_pay_little_is_lost(alpha, fixed, cost):
    machine = Machine(DraftLengths(4), fixed=fixed, cost=cost)
    rate = machine.run([alpha] * 2, 1000) / 2
    assert rate * 1.025 >= 0.95  # with what it took to find out
    assert machine.run([alpha] * 2, 4000) / 2 * 1.025 >= 0.99
    assert machine.num_drafted <= 4


def test_each_sequence_has_its_own_length():
    machine = Machine(DraftLengths(8), fixed=0.05, cost=0.05)
    alphas = [0.9, 0.1, 0.7, 0.05]
    machine.run(alphas, 300)
    wanted = machine.lengths.wanted(np.arange(4), 0.0)
    assert wanted is not None
    assert wanted[0] > wanted[2] > max(wanted[1], wanted[3])
    assert wanted[3] <= 2


def test_drafts_come_back_when_they_pay_again():
    machine = Machine(DraftLengths(4), fixed=0.05, cost=0.05)
    machine.run([0.02], 600)
    assert machine.num_drafted < 30
    before = machine.run([0.9], 600)
    assert machine.run([0.9], 400) > max(2.5, before)


def test_a_new_sequence_starts_with_what_is_known_of_all():
    lengths = DraftLengths(4)
    machine = Machine(lengths, fixed=0.05, cost=0.05)
    machine.run([0.8], 200)
    assert lengths.acceptance == pytest.approx(0.8, abs=0.08)
    lengths.start(0)
    assert machine.run([0.8], 20) > 2.0


def test_the_first_steps_of_a_size_are_without_drafts():
    lengths = DraftLengths(4)
    for _ in range(2):
        assert lengths.wanted(np.arange(2), 0.0) is None
        lengths.measure(2, 0, PLAIN_NS)
    assert lengths.wanted(np.arange(2), 0.0) is not None


def test_a_slow_first_step_with_drafts_counts_for_little():
    lengths = DraftLengths(4)
    machine = Machine(lengths, fixed=40.0, cost=0.05)
    machine.run([0.9], 3)
    machine.fixed = 0.05
    machine.run([0.9], 40)
    assert machine.run([0.9], 100) > 3.0


def test_a_proposer_that_takes_as_long_as_steps_is_not_asked():
    lengths = DraftLengths(4)
    machine = Machine(lengths, fixed=0.0, cost=0.1)
    machine.run([0.6], 60)
    for _ in range(16):
        lengths.wanted(np.arange(1), 5.0 * PLAIN_NS)
    assert lengths.wanted(np.arange(1), 5.0 * PLAIN_NS) is None


def test_without_adapting_a_draft_is_as_long_as_can_be():
    lengths = DraftLengths(4, is_adaptive=False)
    wanted = lengths.wanted(np.arange(3), 1e12)
    assert wanted is not None
    assert wanted.tolist() == [MAX_DRAFT] * 3
