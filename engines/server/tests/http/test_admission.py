"""Seats: what all may have, what one tenant may have, and that nothing stays behind."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from sagellm.server.http.admission import Admission, Quota
from sagellm.server.http.errors import APIError


def refused(admission, tenant, num_sequences=1, num_tokens=0):
    """Return the code with which a request is refused, None if it is not."""
    try:
        with admission.seat(tenant) as seat:
            seat.take(num_sequences, num_tokens)
    except APIError as caught:
        error = caught
    else:
        return None
    assert error.status == 429
    return error.code


@pytest.fixture
def held():
    """Keep requests live until the test ends."""
    with ExitStack() as stack:

        def hold(admission, tenant, num_sequences=1, num_tokens=0):
            stack.enter_context(admission.seat(tenant)).take(num_sequences, num_tokens)

        yield hold


def test_without_keys_one_may_have_all(held):
    admission = Admission(10)
    held(admission, "default", 9)
    assert refused(admission, "default") is None
    assert refused(admission, "default", 2) == "queue_full"


def test_one_key_may_have_all(held):
    admission = Admission(10, {"red": Quota()})
    held(admission, "red", 10)
    assert refused(admission, "red") == "queue_full"


def test_a_key_leaves_as_much_as_it_takes(held):
    admission = Admission(10, {"red": Quota(), "blue": Quota(), "green": Quota()})
    held(admission, "red", 4)
    assert refused(admission, "red", 2) == "tenant_queue_full"
    held(admission, "red")
    assert refused(admission, "red") == "tenant_queue_full"
    assert refused(admission, "blue", 3) == "tenant_queue_full", "half of what red left"
    held(admission, "blue", 2)
    held(admission, "green")
    assert admission.num_live == 8


def test_the_first_sequence_of_a_key_needs_only_a_free_seat(held):
    admission = Admission(4, {"red": Quota(), "blue": Quota(), "green": Quota()})
    held(admission, "red", 2)
    held(admission, "blue")
    assert refused(admission, "green") is None
    assert refused(admission, "blue") == "tenant_queue_full"


@pytest.mark.parametrize("num_flooding", [1, 2, 5])
def test_however_many_flood_the_next_one_gets_in(held, num_flooding):
    names = [f"flood-{number}" for number in range(num_flooding)]
    admission = Admission(120, dict.fromkeys((*names, "next"), Quota()))
    for _ in range(120):
        for name in names:
            if refused(admission, name) is None:
                held(admission, name)
    assert 120 - admission.num_live >= 120 // (num_flooding + 1) - num_flooding
    assert refused(admission, "next") is None


def test_a_request_larger_than_its_share_runs_alone(held):
    admission = Admission(10, {"red": Quota(), "blue": Quota()})
    assert refused(admission, "red", 16) is None
    held(admission, "blue")
    assert refused(admission, "red", 16) == "tenant_queue_full"


def test_a_quota_counts_sequences(held):
    admission = Admission(100, {"red": Quota(max_requests=4), "blue": Quota()})
    held(admission, "red", 3)
    assert refused(admission, "red", 2) == "tenant_queue_full"
    assert refused(admission, "red", 1) is None
    assert refused(admission, "blue", 40) is None


def test_a_quota_counts_tokens(held):
    admission = Admission(100, {"red": Quota(max_tokens=1000), "blue": Quota()})
    held(admission, "red", 1, 600)
    assert refused(admission, "red", 1, 401) == "tenant_tokens_full"
    assert refused(admission, "red", 1, 400) is None
    assert refused(admission, "blue", 1, 10**9) is None


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((2, 0), "more than its 4; try again later"),
        ((5, 0), "more than its 4; it never fits: give a lower n, best_of or the number of prompts"),
        ((1, 90), "more than its 100; try again later"),
        (
            (1, 101),
            "more than its 100; it never fits: give a lower max_tokens, n, best_of or "
            "the length of the prompt",
        ),
    ],
)
def test_what_no_waiting_helps_is_told_so(held, asked, told):
    admission = Admission(100, {"red": Quota(max_requests=4, max_tokens=100), "blue": Quota()})
    held(admission, "red", 3, 20)
    with pytest.raises(APIError) as caught, admission.seat("red") as seat:
        seat.take(*asked)
    assert str(caught.value).endswith(told)
    retry = (b"x-should-retry", b"false") if "never" in told else (b"retry-after", b"1")
    assert caught.value.headers == [retry]


def test_refusals_are_counted_by_tenant_and_code(held):
    admission = Admission(4, {"red": Quota(max_requests=1, max_tokens=5), "blue": Quota()})
    assert refused(admission, "red", 1, 6) == "tenant_tokens_full"
    held(admission, "red")
    assert refused(admission, "red") == "tenant_queue_full"
    assert admission.tenants["red"].num_refused == {"tenant_queue_full": 1, "tenant_tokens_full": 1}
    assert not admission.tenants["blue"].num_refused


def test_nothing_stays_behind_after_any_mix():
    rng = random.Random(0)
    names = ["red", "blue", "green"]
    admission = Admission(50, {name: Quota(max_requests=rng.choice([None, 20])) for name in names})
    stacks = []
    for _ in range(2000):
        if stacks and rng.random() < 0.5:
            stacks.pop(rng.randrange(len(stacks))).close()
            continue
        stack = ExitStack()
        try:
            seat = stack.enter_context(admission.seat(rng.choice(names)))
            seat.take(rng.randrange(1, 12), rng.randrange(100))
        except APIError:
            stack.close()
        else:
            stacks.append(stack)
        assert sum(use.num_live for use in admission.tenants.values()) == admission.num_live <= 50
    for stack in stacks:
        stack.close()
    assert admission.num_live == 0
    assert {(use.num_live, use.num_tokens) for use in admission.tenants.values()} == {(0, 0)}
