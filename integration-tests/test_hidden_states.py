"""Hidden states are those of transformers, whatever computes them, and one for each token that is kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sagellm.accel.native import examine
from sagellm.core import InputBatch, KVLayout, PluginRegistry
from sagellm.core.protocols.attention import HiddenStates
from sagellm.engines import EngineConfig, LLMEngine, SamplingParams
from sagellm.engines.attention.sdpa import SDPABackend
from sagellm.engines.embedded import embedded_model
from sagellm.engines.forward.torch_backend import TorchForwardBackend
from sagellm.engines.loading.load import open_model
from sagellm.engines.testing import make_checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 8, 16
IDS = [3 + (7 * i * i + 5) % 200 for i in range(45)]
BLOCKS = [5, 3, 11, 0, 9, 2]
CUTS = [0, 20, 21, 45]  # a prefill, a decode, and what a step with 23 drafts computes
TOLERANCE = 1e-4

needs_native = pytest.mark.skipif(
    examine().variant is None, reason="no variant of the native library runs here"
)
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int]], torch.Tensor]:
    """Return all hidden states (layers, tokens, hidden_size) of the embedded model, by transformers."""
    return reference_of(embedded_model())


def reference_of(path: Path) -> Callable[[list[int]], torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def hidden_states(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            output = model(torch.tensor([token_ids]), output_hidden_states=True)
        return torch.cat(output.hidden_states)

    return hidden_states


def backend_of(name: str, path: Path) -> Any:
    """Return a backend with KV, and the number and size of the model's layers."""
    config = EngineConfig(model={"name": str(path), "device": "cpu", "dtype": "float32"})
    opened = open_model(config.model, PluginRegistry.load())
    geometry = opened.spec.geometry
    attention = SDPABackend(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=BLOCK_SIZE,
    )
    factory: Any = TorchForwardBackend
    if name == "native":
        from sagellm.accel.native.backend import NativeForwardBackend as factory
    with opened.reading() as weights:
        backend = factory(opened.spec, weights, device=CPU, dtype=torch.float32, attention=attention)
    (group,) = opened.spec.kv_groups("float32")
    backend.initialize_kv_caches([KVLayout(group=group, block_size=BLOCK_SIZE)], [NUM_BLOCKS])
    return backend, geometry


def batch_of(start: int, stop: int) -> InputBatch:
    """Return a step that computes tokens [start, stop), and wants the logits of the last one."""
    positions = list(range(start, stop))
    slots = [BLOCKS[each // BLOCK_SIZE] * BLOCK_SIZE + each % BLOCK_SIZE for each in positions]
    return InputBatch(
        input_ids=torch.tensor(IDS[start:stop]),
        position_ids=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor([BLOCKS]),
        query_lens=[stop - start],
        seq_lens=[stop],
        logits_indices=torch.tensor([stop - start - 1]),
    )


def check_layers(backend: Any, geometry: Any, expected: torch.Tensor) -> None:
    """Ask for some tokens of each step and all layers, then for two layers of every token."""
    num_layers = geometry.num_layers
    for layers, is_all in ((tuple(range(num_layers + 1)), False), ((1, num_layers), True)):
        for start, stop in pairwise(CUTS):
            plain = backend.forward(batch_of(start, stop)).clone()
            batch = batch_of(start, stop)
            rows = list(range(stop - start)) if is_all else sorted({stop - start - 1, 0}, reverse=True)
            values = torch.full((len(layers), len(rows), geometry.hidden_size), torch.nan)
            batch.hidden = HiddenStates(layers=layers, indices=torch.tensor(rows), values=values)
            torch.testing.assert_close(backend.forward(batch), plain, rtol=0, atol=0)
            wanted = expected[list(layers)][:, [start + row for row in rows]]
            # Each number is a sum of numbers as large as the largest of its layer, which is several hundred.
            errors, largest = (each.abs().amax((1, 2)) for each in (values - wanted, wanted))
            assert (errors <= 1e-5 * largest).all(), errors / largest


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_gives_the_states_of_chosen_layers_and_tokens(name, reference):
    backend, geometry = backend_of(name, embedded_model())
    assert "hidden_states" in backend.features
    check_layers(backend, geometry, reference(IDS))


@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_so_does_a_class_of_transformers(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family)
    backend, geometry = backend_of("torch", path)
    check_layers(backend, geometry, reference_of(path)(IDS))


# Two that repeat themselves, so that drafts are accepted and refused.
PROMPTS = [[5, 6, 7, 8] * 6, IDS, [9, 9, 30, 9, 9, 30] * 4]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in pieces": {"max_num_batched_tokens": 17},
    "overlapped": {"executor": "overlapped"},
    "drafts": {"speculation": "ngram{max_tokens=4,min_match=1}", "adaptive_speculation": False},
    "drafts, overlapped": {
        "speculation": "ngram{max_tokens=4,min_match=1}",
        "adaptive_speculation": False,
        "executor": "overlapped",
    },
    "preempted": {"num_blocks": 14, "block_size": 8, "max_num_seqs": 4, "max_model_len": 96},
}
ASKING = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "n": 2, "logprobs": 1, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 4, "stop": ["a", "e"]},
    {"temperature": 0.0, "return_hidden_states": False},
]


def engine_of(**settings: Any) -> LLMEngine:
    given = {"device": "cpu", "dtype": "float32", "num_blocks": 128, "forward_backend": "torch"}
    return LLMEngine(**(given | settings))


def check_outputs(outputs: list[Any], reference: Callable[[list[int]], torch.Tensor]) -> None:
    for output in outputs:
        for one in output.outputs:
            assert one.error is None
            expected = reference([*output.prompt_token_ids, *one.token_ids])[-1]
            places = slice(len(output.prompt_token_ids) - 1, -1)
            assert len(one.hidden_states) == len(one.token_ids)
            states = torch.from_numpy(np.stack(one.hidden_states))
            torch.testing.assert_close(states, expected[places], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("settings", SETTINGS)
def test_each_token_of_an_output_has_the_state_that_it_was_drawn_from(settings, backend, reference):
    engine = engine_of(forward_backend=backend, **SETTINGS[settings])
    prompts = [prompt for prompt in PROMPTS for _ in ASKING]
    given = {"max_tokens": 24, "ignore_eos": True, "return_hidden_states": True}
    params = [SamplingParams(**(given | each)) for _ in PROMPTS for each in ASKING]
    outputs = engine.generate(prompts, params)
    pairs = list(zip(outputs, params, strict=True))
    check_outputs([output for output, each in pairs if each.return_hidden_states], reference)
    others = [output for output, each in pairs if not each.return_hidden_states]
    assert all(one.hidden_states is None for output in others for one in output.outputs)
    told = engine.metrics()
    if settings.startswith("drafts"):
        drafted = told.modules["speculation"]
        assert 0 < drafted.num_accepted_tokens < drafted.num_draft_tokens
    if settings == "preempted":
        assert told.num_preemptions > 0


def test_a_state_follows_its_row_through_masks_and_cached_prefixes(reference):
    engine = engine_of()
    params = SamplingParams(
        max_tokens=6, allowed_token_ids=[11, 12, 13], seed=1, ignore_eos=True, return_hidden_states=True
    )
    for _ in range(2):
        (output,) = engine.generate([IDS], params)
        check_outputs([output], reference)
    assert output.num_cached_tokens > 0


def test_a_failing_row_takes_no_states_from_others(reference, monkeypatch):
    engine = engine_of()
    forward = TorchForwardBackend.forward

    def failing(self: Any, batch: InputBatch) -> torch.Tensor:
        if 2 in batch.seq_lens:
            raise ValueError("no prompt of two tokens")
        return forward(self, batch)

    monkeypatch.setattr(TorchForwardBackend, "forward", failing)
    given = {"max_tokens": 5, "ignore_eos": True, "temperature": 0.0}
    asking, plain = (SamplingParams(**given, return_hidden_states=is_asked) for is_asked in (True, False))
    outputs = engine.generate([PROMPTS[0], [7, 5], PROMPTS[2], PROMPTS[1]], [asking, asking, plain, asking])
    assert "no prompt of two tokens" in outputs[1].outputs[0].error
    check_outputs([outputs[0], outputs[3]], reference)
