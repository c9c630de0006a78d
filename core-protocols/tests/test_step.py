"""An output that does not answer its step is rejected by the name of the executor and of the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sagellm.core import EngineError, StepInput, StepOutput
from sagellm.core.protocols.step import Runs, verify_output


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def step(**what: Any) -> StepInput:
    """Return a step of two decodes and a chunk of a prompt."""
    rows: dict[str, Any] = {
        "step": 7,
        "seats": ints(4, 2, 0),
        "num_new": ints(1, 1, 8),
        "starts": ints(5, 9, 0),
        "is_sampled": np.array([True, True, False]),
    }
    return StepInput(**rows | what)


def output(**what: Any) -> StepOutput:
    rows: dict[str, Any] = {
        "step": 7,
        "tokens": Runs(ints(3, 99), ints(1, 1, 0)),
        "num_accepted": ints(0, 0, 0),
    }
    return StepOutput(**rows | what)


def floats(num_tokens: int) -> Any:
    return np.zeros((num_tokens, 4), np.float32)


def runs(ids: list[int], counts: list[int]) -> Runs:
    return Runs(ints(*ids), ints(*counts))


ARRAYS, COUNTS, ROWS, HIDDEN = (
    "tokens and counts are arrays of integers",
    "a sampled row has one token and those of accepted drafts, any other none",
    "rows are those of the step",
    "hidden states are of the rows that ask for them and have tokens",
)
FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "nothing": ("an executor returns a StepOutput", lambda: None),
    "an earlier step": ("outputs come in the order of their steps", lambda: output(step=6)),
    "a later step": ("outputs come in the order of their steps", lambda: output(step=8)),
    "no runs": ("tokens are Runs", lambda: output(tokens=None)),
    "too few rows": (ARRAYS, lambda: output(tokens=runs([3], [1]))),
    "too many rows": (ARRAYS, lambda: output(tokens=runs([3, 3], [1, 1, 0, 0]))),
    "lists": (ARRAYS, lambda: output(tokens=Runs([3, 99], [1, 1, 0]))),  # type: ignore[arg-type]
    "fractions": (ARRAYS, lambda: output(tokens=Runs(np.array([0.5, 1.0]), ints(1, 1, 0)))),  # type: ignore[arg-type]
    "no counts of drafts": (ARRAYS, lambda: output(num_accepted=None)),
    "no token": (COUNTS, lambda: output(tokens=runs([3], [1, 0, 0]))),
    "a token for a chunk": (COUNTS, lambda: output(tokens=runs([3, 3, 3], [1, 1, 1]))),
    "two tokens without a draft": (COUNTS, lambda: output(tokens=runs([3, 3, 3], [2, 1, 0]))),
    "a negative count": (COUNTS, lambda: output(tokens=runs([3], [-1, 1, 0]))),
    "fewer tokens than counted": ("counts cover all tokens", lambda: output(tokens=runs([3], [1, 1, 0]))),
    "more tokens than counted": ("counts cover all tokens", lambda: output(tokens=runs([3] * 3, [1, 1, 0]))),
    "a token beyond the vocabulary": (
        "a token is in the vocabulary",
        lambda: output(tokens=runs([3, 100], [1, 1, 0])),
    ),
    "a negative token": ("a token is in the vocabulary", lambda: output(tokens=runs([3, -1], [1, 1, 0]))),
    "an error of an unknown row": (ROWS, lambda: output(errors={3: ValueError()})),
    "an error of a negative row": (ROWS, lambda: output(errors={-1: ValueError()})),
    "a text as an error": (
        "an error is an exception",
        lambda: output(errors={0: "oops"}, tokens=runs([3], [0, 1, 0])),
    ),
    "tokens of a row with an error": (COUNTS, lambda: output(errors={0: ValueError()})),
    "log-probabilities of an unknown row": (ROWS, lambda: output(logprobs={3: []})),
    "scores of an unknown row": (ROWS, lambda: output(scores={3: []})),
    "scores in a list": ("scores are PromptScores", lambda: output(scores={2: []})),
    "hidden states that nobody wants": (HIDDEN, lambda: output(hidden_states={0: floats(1)})),
    "hidden states of an unknown row": (ROWS, lambda: output(hidden_states={3: floats(1)})),
    "no mapping": ("error come by row", lambda: output(errors=None)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_output_that_breaks_a_rule_is_rejected_by_name(fault: str) -> None:
    rule, make = FAULTS[fault]
    with pytest.raises(EngineError) as caught:
        verify_output("executor 'late'", step(), make(), vocab_size=100)
    assert str(caught.value).startswith(f"executor 'late' broke the rule {rule!r}")


def test_an_output_that_answers_its_step_passes() -> None:
    for one in (output(), output(errors={0: SystemExit()}, tokens=runs([3], [0, 1, 0]))):
        assert verify_output("", step(), one, vocab_size=100) is one
    error = ValueError()
    failed = StepOutput.failed(step(), error)
    assert verify_output("", step(), failed, vocab_size=100) is failed


def test_a_row_has_at_most_a_token_more_than_drafts() -> None:
    drafted = step(drafts=runs([1, 2], [2, 0, 0]))
    for count in (1, 2, 3):
        accepted = output(tokens=runs([1] * (count + 1), [count, 1, 0]), num_accepted=ints(count - 1, 0, 0))
        assert verify_output("", drafted, accepted, vocab_size=100) is accepted
        with pytest.raises(EngineError, match="one token more than accepted drafts"):
            verify_output("", drafted, replace(accepted, num_accepted=ints(count, 0, 0)), vocab_size=100)
    with pytest.raises(EngineError, match=r"row 0 has 4; possible is 1 … 3"):
        verify_output("", drafted, output(tokens=runs([1] * 5, [4, 1, 0])), vocab_size=100)


def test_a_row_that_asks_has_a_hidden_state_for_each_token() -> None:
    asked = step(drafts=runs([1, 2], [2, 0, 0]), hidden_rows=np.array([True, False, False]))
    accepted = output(tokens=runs([1] * 3, [2, 1, 0]), num_accepted=ints(1, 0, 0))
    good = replace(accepted, hidden_states={0: floats(2)})
    assert verify_output("", asked, good, vocab_size=100) is good
    for states in ({}, {1: floats(1)}, {0: floats(2), 1: floats(1)}):
        with pytest.raises(EngineError, match="hidden states are of the rows that ask for them"):
            verify_output("", asked, replace(accepted, hidden_states=states), vocab_size=100)
    for wrong in (floats(1), floats(3), np.zeros(2), [[0.0]] * 2):
        with pytest.raises(EngineError, match="each token of a row that asks has a hidden state"):
            verify_output("", asked, replace(accepted, hidden_states={0: wrong}), vocab_size=100)
    failed = StepOutput.failed(asked, ValueError())
    assert verify_output("", asked, failed, vocab_size=100) is failed
