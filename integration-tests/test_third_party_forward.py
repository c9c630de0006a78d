"""An outside package runs checkpoints by a forward backend in numpy, from a spec and weights alone."""

from __future__ import annotations

import ast
import importlib
import json
import logging
from pathlib import Path

import pytest
import torch
from scratch import Scratch
from transformers import AutoModelForCausalLM

from sagellm.core import InvalidRequestError, PluginRegistry, UnsupportedModelError
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "third-party-forward"
PROMPTS = [[3 + (7 * i * i + 5 * length) % 500 for i in range(length)] for length in (23, 40, 40)]
NUM_TOKENS = 12
REASON = "it lacks sliding_window, which MistralForCausalLM needs"

GENERATE = """
import json
import sys

from sagellm.engines import LLMEngine, SamplingParams

path, prompts = sys.argv[1], json.loads(sys.argv[2])
engine = LLMEngine(
    model=path, device="cpu", dtype="float32", num_blocks=64, max_num_batched_tokens=24,
    forward_backend="auto",
)
backend = type(engine.client.core.runner.backend)
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
tokens = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]
print(json.dumps([backend.__module__, tokens]))
"""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("numpy") / "qwen3", family="qwen3")


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("numpy") / "mistral", family="mistral")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> PluginRegistry:
    """The package is registered here as its entry point would be."""
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    found = PluginRegistry.load()
    found.register(importlib.import_module("acme_numpy.plugin"), distribution="acme-numpy")
    return found


def engine(path: Path, backend: str, registry: PluginRegistry) -> LLMEngine:
    """Make one whose steps cut prompts into pieces, and whose prompts share a prefix."""
    return LLMEngine(
        model=str(path),
        device="cpu",
        dtype="float32",
        num_blocks=64,
        max_num_batched_tokens=24,
        forward_backend=backend,
        registry=registry,
    )


def backend_of(made: LLMEngine) -> str:
    return type(made.client.core.runner.backend).__name__  # type: ignore[attr-defined]


def generate(made: LLMEngine) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in made.generate(PROMPTS, params)]


def theirs(path: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        outputs = [model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS)[0] for ids in PROMPTS]
    return [out[len(ids) :].tolist() for ids, out in zip(PROMPTS, outputs, strict=True)]


def test_it_knows_nothing_of_the_engine() -> None:
    tree = ast.parse((EXAMPLE / "src" / "acme_numpy" / "backend.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert modules == {
        "__future__",
        "collections.abc",
        "typing",
        "numpy",
        "numpy.typing",
        "torch",
        "sagellm.core",
    }


def test_it_gives_the_tokens_of_transformers_and_of_the_torch_backend(
    qwen3: Path, registry: PluginRegistry
) -> None:
    made = engine(qwen3, "numpy", registry)
    assert backend_of(made) == "NumpyForwardBackend"
    assert generate(made) == theirs(qwen3) == generate(engine(qwen3, "torch", registry))


def test_a_feature_that_it_lacks_selects_the_next_backend_and_says_why(
    mistral: Path, registry: PluginRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sagellm"):
        made = engine(mistral, "auto", registry)
    assert backend_of(made) in ("NativeForwardBackend", "TorchForwardBackend")
    assert f"the forward backend acme-numpy:numpy is not used: {REASON}" in caplog.text
    info = made.client.core.info  # type: ignore[attr-defined]
    assert info.refusals["acme-numpy:numpy"] == REASON
    assert info.settings["forward.backend"] in ("sagellm-accel:native", "torch")
    assert generate(made) == theirs(mistral)


def test_naming_it_for_such_a_model_is_an_error_that_names_the_feature(
    mistral: Path, registry: PluginRegistry
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"forward.backend is 'numpy', which .*{REASON}"):
        engine(mistral, "numpy", registry)


def test_hidden_states_that_it_cannot_return_are_refused_before_anything_is_queued(
    qwen3: Path, registry: PluginRegistry
) -> None:
    made = engine(qwen3, "numpy", registry)
    told = "return_hidden_states is True, and the forward backend numpy cannot return hidden states"
    with pytest.raises(InvalidRequestError, match=told):
        made.add_request(PROMPTS[0], SamplingParams(return_hidden_states=True))
    assert not made.has_unfinished_requests()
    assert made.metrics().num_prompt_tokens == 0


@pytest.mark.full  # test_third_party_policy.py installs one from outside in the shorter suite
def test_installed_it_runs_a_checkpoint(qwen3: Path, tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "environment")
    scratch.install(EXAMPLE)
    done = scratch.run("-c", GENERATE, qwen3, json.dumps(PROMPTS))
    assert json.loads(done.stdout) == ["acme_numpy.backend", theirs(qwen3)]
