"""Settings of ours as other engines' command lines, word for word."""

from __future__ import annotations

import json

import pytest

from sagellm.adapters.export.lmdeploy import LMDeployAdapter
from sagellm.adapters.export.tgi import TGIAdapter
from sagellm.adapters.export.vllm import VLLMAdapter
from sagellm.core import ConfigError, EngineAdapterProtocol
from sagellm.core.protocols.engine_adapter import NullEngineAdapter
from sagellm.testing.engine_adapter import KIT_SETTINGS, EngineAdapterContract


class TestVLLMAdapter(EngineAdapterContract):
    def make(self) -> EngineAdapterProtocol:
        return VLLMAdapter()


class TestLMDeployAdapter(EngineAdapterContract):
    def make(self) -> EngineAdapterProtocol:
        return LMDeployAdapter()


class TestTGIAdapter(EngineAdapterContract):
    def make(self) -> EngineAdapterProtocol:
        return TGIAdapter()


class TestNullEngineAdapter(EngineAdapterContract):
    def make(self) -> EngineAdapterProtocol:
        return NullEngineAdapter()


def test_vllm_gets_flags_passes_and_a_policy_for_what_it_offloads():
    found = VLLMAdapter().export(
        "Qwen/Qwen3-0.6B",
        {
            "scheduler.max_num_seqs": 64,
            "scheduler.order": {"name": "shortest", "options": {"patience": 2}},
            "scheduler.chunk": "chunked-prefill",
            "scheduler.step_target_ms": 50,
            "kv.tiers": {"host": 1 << 30},
            "prefix_cache.eviction_policy": "reuse",
            "prefix_cache.enabled": False,
        },
    )
    head, additional, transfer = found.arguments[:8], found.arguments[9], found.arguments[11]
    assert head == (
        *("vllm", "serve", "Qwen/Qwen3-0.6B", "--max-num-seqs", "64"),
        *("--no-enable-prefix-caching", "--scheduler-cls", "sagellm.adapters.vllm.AsyncScheduler"),
    )
    assert json.loads(additional) == {
        "sagellm": {"passes": "order=shortest{patience=2},chunk=chunked-prefill", "step_target_ms": 50}
    }
    assert json.loads(transfer)["kv_connector_extra_config"] == {
        "cpu_bytes_to_use": 1 << 30,
        "eviction_policy": "reuse",
        "cache_policy_module_path": "sagellm.adapters.vllm.cache_policies",
    }


def test_our_lru_in_vllm_has_a_name_that_is_not_its_own():
    settings = {"kv.tiers": {"host": {"max_bytes": 1024}}, "prefix_cache.eviction_policy": "lru"}
    assert '"sagellm-eviction-policy:lru"' in VLLMAdapter().export("M", settings).text


def test_lmdeploy_and_tgi_get_the_settings_that_they_have():
    settings = {"scheduler.max_num_seqs": 64, "scheduler.max_num_batched_tokens": 4096, "server.port": 9000}
    assert LMDeployAdapter().export("M", settings | {"prefix_cache.enabled": True}).text == (
        "lmdeploy serve api_server M --max-batch-size 64 --max-prefill-token-num 4096 --server-port 9000 "
        "--enable-prefix-caching"
    )
    assert TGIAdapter().export("M", settings).text == (
        "text-generation-launcher --model-id M --max-batch-size 64 --max-batch-prefill-tokens 4096 "
        "--port 9000"
    )


@pytest.mark.parametrize(
    ("adapter", "settings", "why"),
    [
        (LMDeployAdapter(), {"scheduler.order": "shortest"}, "takes no passes"),
        (TGIAdapter(), {"prefix_cache.eviction_policy": "reuse"}, "takes no policy"),
        (LMDeployAdapter(), {"kv.block_size": 48}, "a multiple of 32"),
        (TGIAdapter(), {"model.dtype": "float32"}, "float16 or bfloat16"),
        (LMDeployAdapter(), {"prefix_cache.enabled": False}, "must be true"),
        (VLLMAdapter(), {"prefix_cache.eviction_policy": "reuse"}, "set kv.tiers"),
        (VLLMAdapter(), {"kv.tiers": {"host": 1, "file": 2}}, "one tier, host"),
        (VLLMAdapter(), {"scheduler.step_target_ms": 50}, "needs a pass"),
        (VLLMAdapter(), {"scheduler.max_num_seq": 5}, "Did you mean"),
        (NullEngineAdapter(), {"server.port": 1}, "no setting of ours"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_an_engine_has_not_is_refused_with_the_reason(adapter, settings, why):
    with pytest.raises(ConfigError, match=why):
        adapter.export("M", settings)


def test_the_kit_has_a_value_for_every_setting_that_is_known_or_refused():
    for adapter in (VLLMAdapter(), LMDeployAdapter(), TGIAdapter()):
        assert {*adapter.knobs(), *adapter.refusals()} <= KIT_SETTINGS.keys()
