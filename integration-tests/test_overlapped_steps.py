"""Steps launched before the last one's tokens are on the host give the same tokens."""

from __future__ import annotations

import pytest
import torch

from sagellm.core import UnsupportedModelError
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.sampling import draws
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.device_draw import DeviceDrawOnCPU

PROMPTS = [[5, 6, 7, 8] * 5, [9, 10], [5, 6, 7, 8] * 5 + [1], [30] * 40, [77], [78, 79]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("overlapped"), num_hidden_layers=1)


@pytest.fixture
def draw(monkeypatch):
    try:
        made = DeviceDrawOnCPU()
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(draws, "device_draw", lambda device: made)
    return made


def engine_of(checkpoint, executor, **sections):
    return LLMEngine(
        EngineConfig(
            model={"name": str(checkpoint), "device": "cpu"},
            kv={"num_blocks": 40, "block_size": 8},
            forward={"executor": executor},
            scheduler={"max_num_seqs": 3, "max_num_batched_tokens": 32},
            **sections,
        )
    )


def tokens_of(engine, params):
    return [each.outputs[0].token_ids for each in engine.generate(PROMPTS, params)]


PLAIN = [
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=3),
    SamplingParams(temperature=1.2, top_k=5, seed=4, max_tokens=12),
    SamplingParams(temperature=1.0, min_p=0.05, seed=5, max_tokens=7),
    SamplingParams(temperature=1.0, seed=6, max_tokens=5),
    SamplingParams(temperature=0.0, max_tokens=1),
]


def test_tokens_that_stay_on_the_device_are_those_of_steps_one_by_one(checkpoint, draw, monkeypatch):
    found = tokens_of(engine_of(checkpoint, "overlapped"), PLAIN)
    assert draw.num_draws > 10
    monkeypatch.setattr(draws, "device_draw", lambda device: None)
    assert found == tokens_of(engine_of(checkpoint, "inline"), PLAIN)


def test_penalties_see_a_token_in_flight(checkpoint, draw, monkeypatch):
    params = [*PLAIN[:4], SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=8)]
    params += [SamplingParams(temperature=0.0, logprobs=2, max_tokens=5)]
    found = tokens_of(engine_of(checkpoint, "overlapped"), params)
    assert draw.num_draws > 3
    monkeypatch.setattr(draws, "device_draw", lambda device: None)
    assert found == tokens_of(engine_of(checkpoint, "inline"), params)


def test_a_draw_that_fails_for_one_row_ends_that_request_alone(checkpoint, draw, monkeypatch):
    expected = tokens_of(engine_of(checkpoint, "overlapped"), PLAIN)
    engine = engine_of(checkpoint, "overlapped")
    backend = engine.client.core.runner.backend
    forward = backend.forward

    def with_a_hole(batch):
        logits = forward(batch)
        if 41 in batch.seq_lens:  # the sequence of 40 tokens and one of its own
            row = batch.seq_lens.index(41)
            wanted = [sum(batch.query_lens[: row + 1]) - 1]
            logits[torch.isin(batch.logits_indices, torch.tensor(wanted))] = torch.nan
        return logits

    monkeypatch.setattr(backend, "forward", with_a_hole)
    outputs = engine.generate(PROMPTS, PLAIN)
    assert [each.outputs[0].finish_reason for each in outputs].count("error") == 1
    assert outputs[3].outputs[0].finish_reason == "error"
    found = [each.outputs[0].token_ids for each in outputs]
    assert found[:3] + found[4:] == expected[:3] + expected[4:]
