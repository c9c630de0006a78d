"""A queue that passes reorder for one step, against a deque, which is what it replaces."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from sagellm.adapters import RequestTable, WaitingQueue


@dataclass(eq=False)
class Theirs:
    request_id: str
    num_prompt_tokens: int = 4
    num_computed_tokens: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    max_tokens: int = 8
    outputs: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.outputs)


def make(*names: str) -> tuple[WaitingQueue[Theirs], dict[str, Theirs]]:
    table: RequestTable[Theirs] = RequestTable(16, num_schedulable=lambda request: request.num_tokens)
    queue, requests = WaitingQueue(table), {name: Theirs(name) for name in names}
    for request in requests.values():
        queue.add_request(request)
    return queue, requests


def names(queue: WaitingQueue[Theirs]) -> list[str]:
    return [request.request_id for request in queue]


def test_an_open_queue_yields_the_chosen_order_and_then_seems_empty():
    queue, _ = make(*"abcd")
    queue.rows()
    queue.open(np.array([2, 0]))
    assert [queue.pop_request().request_id for _ in range(2)] == ["c", "a"]
    assert not queue
    assert len(queue) == 2
    with pytest.raises(IndexError):
        queue.peek_request()
    queue.close()
    assert queue
    assert names(queue) == ["b", "d"]


def test_who_comes_back_is_first_in_line_and_not_yielded_twice():
    queue, requests = make(*"abc")
    queue.rows()
    queue.open(np.array([1, 0, 2]))
    blocked = queue.pop_request()
    assert queue.pop_request() is requests["a"]
    queue.prepend_requests([blocked])
    assert queue.pop_request() is requests["c"]
    assert not queue
    queue.close()
    assert names(queue) == ["b"]
    assert {position: each.request_id for position, each in queue.taken().items()} == {0: "a", 2: "c"}


def test_whoever_is_preempted_while_the_line_is_open_waits_for_the_next_step():
    queue, _ = make(*"ab")
    queue.rows()
    queue.open(np.array([1, 0]))
    queue.prepend_request(Theirs("preempted"))
    assert queue.pop_request().request_id == "b"
    queue.close()
    assert names(queue) == ["preempted", "a"]


def test_rows_are_the_same_object_until_somebody_comes_or_goes():
    queue, requests = make(*"ab")
    rows = queue.rows()
    assert queue.rows() is rows
    assert queue.is_as_seen
    queue.open(np.array([1, 0]))
    queue.close()
    assert queue.rows() is rows, "nobody was popped"
    queue.remove_request(requests["a"])
    assert not queue.is_as_seen
    assert queue.rows() is not rows
    assert len(rows) == 2, "what passes have seen stays as it was"
    assert rows[0].request_id == "a"


def test_a_request_that_comes_back_has_its_output_in_its_row():
    queue, _ = make("a")
    assert queue.rows().num_tokens.tolist() == [4]
    request = queue.pop_request()
    request.outputs += [1, 2]
    queue.prepend_request(request)
    assert queue.rows().num_tokens.tolist() == [6]
    assert queue.rows()[0].num_tokens == 6


def test_only_a_request_that_waits_can_be_removed():
    queue, _ = make("a")
    with pytest.raises(ValueError, match="stranger"):
        queue.remove_request(Theirs("stranger"))
    queue.remove_requests([Theirs("stranger")])
    assert names(queue) == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_deque_whatever_happens(seed):
    rng = Random(seed)
    queue, _ = make()
    model: deque[Theirs] = deque()
    popped: list[Theirs] = []
    for number in range(300):
        action = rng.randrange(6)
        if action <= 1:
            request = Theirs(str(number))
            queue.add_request(request)
            model.append(request)
        elif action == 2 and model:
            assert queue.peek_request() is model[0]
            popped.append(queue.pop_request())
            assert popped[-1] is model.popleft()
        elif action == 3 and popped:
            back = [popped.pop() for _ in range(rng.randint(1, len(popped)))]
            queue.prepend_requests(back)
            model.extendleft(back)
        elif action == 4 and model:
            gone = rng.sample(list(model), rng.randint(1, len(model)))
            queue.remove_requests(gone)
            model = deque(each for each in model if each not in gone)
        elif model:
            order = rng.sample(range(len(model)), rng.randint(0, len(model)))
            rows, snapshot = queue.rows(), list(model)
            queue.open(np.array(order, np.intp))
            num_taken = rng.randint(0, len(order))
            for position in order[:num_taken]:
                assert queue.pop_request() is snapshot[position]
            assert bool(queue) == (num_taken < len(order))
            queue.close()
            popped += [snapshot[position] for position in order[:num_taken]]
            model = deque(each for i, each in enumerate(snapshot) if i not in order[:num_taken])
            assert [row.request_id for row in rows] == [each.request_id for each in snapshot]
        assert (len(queue), bool(queue)) == (len(model), bool(model))
        assert list(queue) == list(model)
