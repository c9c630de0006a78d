"""The order in which sequences wait and run."""

from __future__ import annotations

import random

import pytest

from sagellm.core import Request, RequestId, SequenceId, pack
from sagellm.engines import SamplingParams
from sagellm.engines.engine_core.sequence import Sequence
from sagellm.engines.engine_core.waiting import WaitingRows, place_of
from sagellm.engines.requests.queued_request import QueuedSequence


def sequence(name, *, priority=0, arrival_ns=0):
    request = Request(
        request_id=RequestId(name),
        token_ids=pack([5, 6]),
        max_tokens=4,
        priority=priority,
        arrival_ns=arrival_ns,
    )
    return Sequence.of(QueuedSequence(SequenceId(name), request, SamplingParams(), 0, frozenset()))


@pytest.mark.parametrize(
    ("priority", "arrival_ns", "place"),
    [
        (0, 9, 4),  # the latest
        (0, 7, 4),  # as late as the last one: behind it
        (0, 6, 3),
        (0, 5, 3),  # behind its equal
        (0, 1, 2),
        (5, 1, 0),
        (5, 3, 1),
        (5, 9, 2),  # late, but urgent
        (9, 9, 0),
        (-1, 1, 4),
    ],
)
def test_a_sequence_goes_behind_its_equals(priority, arrival_ns, place):
    others = [
        sequence("a", priority=5, arrival_ns=2),
        sequence("b", priority=5, arrival_ns=4),
        sequence("c", arrival_ns=5),
        sequence("d", arrival_ns=7),
    ]
    assert place_of(sequence("new", priority=priority, arrival_ns=arrival_ns), others) == place


def test_the_first_sequence_has_the_first_place():
    assert place_of(sequence("a"), []) == 0


def test_sequences_wait_by_priority_then_arrival_then_order_of_coming():
    rng, waiting = random.Random(1), WaitingRows()
    given = [
        sequence(str(number), priority=rng.randrange(3), arrival_ns=rng.randrange(5)) for number in range(60)
    ]
    for each in given:
        place = waiting.add(each)
        assert waiting[place] is each
    expected = sorted(given, key=lambda each: (-each.request.priority, each.request.arrival_ns))
    assert [waiting[place] for place in range(len(waiting))] == expected
    assert [row.request_id for row in waiting.rows()] == [each.sequence_id for each in expected]
