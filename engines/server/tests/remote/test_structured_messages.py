"""What an output must match crosses the link to the core, and a refusal comes back as one."""

from __future__ import annotations

import pytest

from sagellm.core import SequenceId, TokenOutput
from sagellm.engines import SamplingParams
from sagellm.server.remote.messages import Add, FrameReader, FromCore, Step, ToCore, encode


@pytest.mark.parametrize(
    "given",
    [
        {"choice": ["a", "b"]},
        {"json": {"type": "object", "properties": {"ü": {}}}},
        {"json": True},
        {"json_object": True},
        {"regex": "a+"},
        {"structural_tag": {"type": "structural_tag", "format": {}}},
    ],
)
def test_parameters_arrive_as_they_were_sent(given):
    params = SamplingParams(structured_outputs=given)
    reader = FrameReader(ToCore)
    reader.add(encode(Add(params, frozenset({1}), [])))
    arrived = reader.next().params
    assert arrived == params
    assert (arrived.structured_outputs.kind, arrived.structured_outputs.text) == (
        params.structured_outputs.kind,
        params.structured_outputs.text,
    )


def test_a_refusal_is_one_on_both_sides():
    output = TokenOutput(SequenceId("a"), finish_reason="error", error="no", is_refused=True)
    reader = FrameReader(FromCore)
    reader.add(encode(Step([output])))
    (arrived,) = reader.next().outputs
    assert (arrived.error, arrived.is_refused) == ("no", True)
