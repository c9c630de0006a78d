"""Where a model runs, which family runs it, and what its checkpoint asks for."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from sagellm.core import CheckpointError, ConfigError, PluginRegistry, UnsupportedModelError
from sagellm.core.protocols.model_family import NullModelFamily
from sagellm.engines import LLMEngine
from sagellm.engines.loading import (
    installed_families,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    select_family,
)


def test_a_device_is_a_name_or_a_device():
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("name", "message"), [("tpu", "must be auto, cpu"), ("cuda:99", "torch finds")])
def test_a_device_that_is_not_there_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_device(name)


@pytest.mark.parametrize(
    ("name", "config", "dtype"),
    [
        ("auto", {"dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"torch_dtype": "torch.float16"}, torch.float16),
        ("auto", {}, torch.float32),
        ("auto", {"dtype": "float8"}, torch.float32),
        ("bfloat16", {"dtype": "float32"}, torch.bfloat16),
        (torch.float16, {}, torch.float16),
    ],
)
def test_auto_is_the_checkpoints_own_dtype(name, config, dtype):
    assert resolve_dtype(name, config) is dtype


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="must be auto, float32"):
        resolve_dtype("int3", {})


class Refusing(NullModelFamily):
    def accepts(self, config):
        return True


class Fallback(NullModelFamily):
    is_fallback = True

    def accepts(self, config):
        return True

    def spec(self, config, tensor_names):
        return "spec"


def test_a_fallback_is_asked_last_and_takes_over_where_another_refuses(caplog):
    selected = select_family({"architectures": ["A"]}, [Fallback(), NullModelFamily(), Refusing()])
    assert isinstance(selected.family, Fallback)
    assert selected.spec == "spec"
    assert "the null family runs no model" in caplog.text


@pytest.mark.parametrize(
    ("config", "families", "error", "message"),
    [
        ({"architectures": ["A"]}, [Refusing()], UnsupportedModelError, "the null family runs no model"),
        ({"model_type": "a"}, [NullModelFamily()], UnsupportedModelError, "no installed model family knows"),
        ({"model_type": "a", "auto_map": {}}, [], UnsupportedModelError, "no installed model family knows"),
        ({"model_type": "a", "auto_map": {"b": "c"}}, [], UnsupportedModelError, "which is never run"),
        ({}, [], CheckpointError, "neither architectures nor a model_type"),
    ],
)
def test_a_model_that_nothing_runs_is_refused_with_every_reason(config, families, error, message):
    with pytest.raises(error, match=message):
        select_family(config, families)


def test_all_installed_families_are_asked():
    names = {type(family).__name__ for family in installed_families(PluginRegistry.load())}
    assert {"Qwen3Family", "LlamaFamily", "TransformersFamily"} <= names


def test_a_checkpoint_may_lack_a_tokenizer_but_not_have_a_damaged_one(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_loading_shows_its_bytes_on_a_terminal(checkpoint, monkeypatch):
    read = []

    @contextmanager
    def bar(label, *, total, unit, enabled=True):
        yield read.append
        assert (label, sum(read)) == ("loading weights", total)

    monkeypatch.setattr("sagellm.engines.loading.load.progress_bar", bar)
    LLMEngine(model=checkpoint, num_blocks=8, device="cpu")
    assert sum(read) > 1000
