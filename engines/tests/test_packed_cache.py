"""`model.packed_cache`: an engine whose weights are mapped answers as one that packs them."""

from __future__ import annotations

import os

from sagellm.engines import LLMEngine, SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def answer(**settings) -> tuple[list[int], str]:
    with LLMEngine("embedded", num_blocks=16, **settings) as engine:
        tokens = list(engine.generate("The river", GREEDY)[0].outputs[0].token_ids)
        return tokens, engine.config.forward.backend.name


def test_an_engine_with_packed_weights_answers_as_before(tmp_path):
    expected, backend = answer()
    folder = tmp_path / "packed"
    assert answer(packed_cache=folder) == answer(packed_cache=folder) == (expected, backend)
    if backend != "torch":  # where the native library runs
        assert len(os.listdir(folder)) == 1


def test_a_backend_that_keeps_no_packed_weights_says_so(tmp_path, caplog):
    answer(packed_cache=tmp_path, forward_backend="torch")
    assert "the forward backend torch keeps no packed weights: model.packed_cache is unused" in caplog.text
    assert os.listdir(tmp_path) == []
