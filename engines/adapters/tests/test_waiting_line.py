"""A queue that passes reorder for one step, against a deque, which is what it replaces."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from sagellm.adapters import RequestTable, WaitingLine


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


def make(*names: str) -> tuple[WaitingLine[Theirs], dict[str, Theirs]]:
    table: RequestTable[Theirs] = RequestTable(16, num_schedulable=lambda request: request.num_tokens)
    line, requests = WaitingLine(table), {name: Theirs(name) for name in names}
    for request in requests.values():
        line.add_request(request)
    return line, requests


def names(line: WaitingLine[Theirs]) -> list[str]:
    return [request.request_id for request in line]


def test_an_open_line_yields_the_chosen_order_and_then_seems_empty():
    line, _ = make(*"abcd")
    line.rows()
    line.open(np.array([2, 0]))
    assert [line.pop_request().request_id for _ in range(2)] == ["c", "a"]
    assert not line
    assert len(line) == 2
    with pytest.raises(IndexError):
        line.peek_request()
    line.close()
    assert line
    assert names(line) == ["b", "d"]


def test_who_comes_back_is_first_in_line_and_not_yielded_twice():
    line, requests = make(*"abc")
    line.rows()
    line.open(np.array([1, 0, 2]))
    blocked = line.pop_request()
    assert line.pop_request() is requests["a"]
    line.prepend_requests([blocked])
    assert line.pop_request() is requests["c"]
    assert not line
    line.close()
    assert names(line) == ["b"]
    assert {position: each.request_id for position, each in line.taken().items()} == {0: "a", 2: "c"}


def test_whoever_is_preempted_while_the_line_is_open_waits_for_the_next_step():
    line, _ = make(*"ab")
    line.rows()
    line.open(np.array([1, 0]))
    line.prepend_request(Theirs("preempted"))
    assert line.pop_request().request_id == "b"
    line.close()
    assert names(line) == ["preempted", "a"]


def test_rows_are_the_same_object_until_somebody_comes_or_goes():
    line, requests = make(*"ab")
    rows = line.rows()
    assert line.rows() is rows
    assert line.is_as_seen
    line.open(np.array([1, 0]))
    line.close()
    assert line.rows() is rows, "nobody was popped"
    line.remove_request(requests["a"])
    assert not line.is_as_seen
    assert line.rows() is not rows
    assert len(rows) == 2, "what passes have seen stays as it was"
    assert rows[0].request_id == "a"


def test_a_request_that_comes_back_has_its_output_in_its_row():
    line, _ = make("a")
    assert line.rows().num_tokens.tolist() == [4]
    request = line.pop_request()
    request.outputs += [1, 2]
    line.prepend_request(request)
    assert line.rows().num_tokens.tolist() == [6]
    assert line.rows()[0].num_tokens == 6


def test_only_a_request_that_waits_can_be_removed():
    line, _ = make("a")
    with pytest.raises(ValueError, match="stranger"):
        line.remove_request(Theirs("stranger"))
    line.remove_requests([Theirs("stranger")])
    assert names(line) == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_deque_whatever_happens(seed):
    rng = Random(seed)
    line, _ = make()
    model: deque[Theirs] = deque()
    popped: list[Theirs] = []
    for number in range(300):
        action = rng.randrange(6)
        if action <= 1:
            request = Theirs(str(number))
            line.add_request(request)
            model.append(request)
        elif action == 2 and model:
            assert line.peek_request() is model[0]
            popped.append(line.pop_request())
            assert popped[-1] is model.popleft()
        elif action == 3 and popped:
            back = [popped.pop() for _ in range(rng.randint(1, len(popped)))]
            line.prepend_requests(back)
            model.extendleft(back)
        elif action == 4 and model:
            gone = rng.sample(list(model), rng.randint(1, len(model)))
            line.remove_requests(gone)
            model = deque(each for each in model if each not in gone)
        elif model:
            order = rng.sample(range(len(model)), rng.randint(0, len(model)))
            rows, snapshot = line.rows(), list(model)
            line.open(np.array(order, np.intp))
            num_taken = rng.randint(0, len(order))
            for position in order[:num_taken]:
                assert line.pop_request() is snapshot[position]
            assert bool(line) == (num_taken < len(order))
            line.close()
            popped += [snapshot[position] for position in order[:num_taken]]
            model = deque(each for i, each in enumerate(snapshot) if i not in order[:num_taken])
            assert [row.request_id for row in rows] == [each.request_id for each in snapshot]
        assert (len(line), bool(line)) == (len(model), bool(model))
        assert list(line) == list(model)
