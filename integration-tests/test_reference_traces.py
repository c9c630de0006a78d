"""The two traces of the reference experiment can be made again from their seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sagellm.lab.simulation.conversations import ConversationSettings, simulate_clients
from sagellm.lab.traces import read_trace
from sagellm.lab.traces.lengths import Lengths

TRACES = Path(__file__).parents[1] / "benchmarks" / "traces"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("multi_turn", ConversationSettings(seed=3)),
        (
            "single_turn",
            ConversationSettings(
                turns=Lengths("fixed", (1.0,)), user_len=Lengths("lognormal", (303.0, 0.5)), seed=3
            ),
        ),
    ],
)
def test_the_reference_traces_can_be_made_again(name, settings):
    found = read_trace(TRACES / f"{name}.jsonl.xz")
    made = simulate_clients(settings)
    assert [one.token_ids for one in found] == [one.token_ids for one in made]
    assert [one.arrival_s for one in found] == pytest.approx([one.arrival_s for one in made], abs=1e-5)
