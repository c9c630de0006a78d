"""What is done before a model's modules are imported, and when it is not."""

import gc
import shutil

import pytest

from sagellm.accel.native.library import examine
from sagellm.accel.native.memory import _weight_memory
from sagellm.core import ProviderSpec
from sagellm.engines import LLMEngine, SamplingParams, head_start
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.embedded import embedded_model
from sagellm.engines.head_start import weights_ahead, without_collections

needs_native = pytest.mark.skipif(examine().variant is None, reason="the native library does not run here")


def test_no_garbage_is_searched_for_in_the_block():
    assert gc.isenabled()
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), without_collections():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def ahead_for(**values):
    """Return the bytes that are taken ahead for a configuration, None for none."""
    dotted = {name.replace("__", "."): value for name, value in values.items()}
    with weights_ahead(EngineConfig().with_values(dotted)):
        ahead = _weight_memory.get()
        return None if ahead is None else ahead._num_touched_bytes


@pytest.fixture
def small(monkeypatch):
    """Take memory for small models too."""
    monkeypatch.setattr(head_start, "_SMALLEST_BYTES", 1)


@needs_native
def test_memory_is_taken_for_what_the_files_hold(small):
    size = (embedded_model() / "model.safetensors").stat().st_size
    assert ahead_for(model__device="cpu") == size


def test_a_small_model_needs_no_thread():
    assert ahead_for(model__device="cpu") is None


@pytest.mark.parametrize(
    "values",
    [
        {"model__quantization": ProviderSpec("int8")},
        {"model__dtype": "float32"},
        {"model__device": "cuda"},
        {"forward__backend": ProviderSpec("torch")},
        {"forward__backend": ProviderSpec("native", {"variant": "avx2"})},
        {"engine__name": ProviderSpec("another")},
        {"model__name": "no/such-model"},
    ],
)
def test_no_memory_is_taken_for_what_may_not_use_it(small, values, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ahead_for(**({"model__device": "cpu"} | values)) is None


def test_no_memory_is_taken_that_a_backend_may_need(small, monkeypatch):
    monkeypatch.setattr(head_start, "_available_bytes", lambda: 1 << 20)
    assert ahead_for(model__device="cpu") is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_left_to_loading(small, tmp_path, name):
    path = shutil.copytree(embedded_model(), tmp_path / "model")
    (path / name).unlink()
    assert ahead_for(model__device="cpu", model__name=str(path)) is None
    (path / "config.json").write_text("{")
    assert ahead_for(model__device="cpu", model__name=str(path)) is None


@needs_native
def test_tokens_are_the_same_in_memory_that_was_taken_ahead(small):
    params = SamplingParams(temperature=0.0, max_tokens=24)
    config = EngineConfig().with_values({"model.device": "cpu", "kv.num_blocks": 64})
    found = []
    for num_bytes in (1, 1 << 40):  # the least size that takes memory ahead
        head_start._SMALLEST_BYTES = num_bytes
        with weights_ahead(config):
            is_ahead = _weight_memory.get() is not None
            engine = LLMEngine(config)
        found.append((is_ahead, engine.generate("The river has", params)[0].outputs[0].token_ids))
        engine.close()
    assert [is_ahead for is_ahead, _ in found] == [True, False]
    assert found[0][1] == found[1][1]
