"""`adapter list|show`: settings of ours as another engine's command line."""

from __future__ import annotations

import pytest

pytest.importorskip("sagellm.adapters", reason="sagellm-adapters is not installed")


def test_the_list_has_each_setting_with_its_name_there(sage):
    assert "--max-batch-size" in sage("llm", "adapter", "list").out
    found = sage("llm", "adapter", "list", "--json").json
    assert {"vllm", "lmdeploy", "tgi"} <= found.keys()
    assert found["tgi"]["knobs"]["scheduler.max_num_seqs"] == "--max-batch-size"


def test_what_is_set_is_exported_and_defaults_are_left_to_the_engine(sage, tmp_path):
    (tmp_path / "sagellm.yaml").write_text(
        "scheduler: {passes: 'order=shortest,share=none'}\nkv: {tiers: {host: 1KiB}}"
    )
    flags = ("--model", "some/model", "--max-num-seqs", "64", "--eviction-policy", "qos{within=lru}")
    found = sage("llm", "adapter", "show", "vllm", *flags, "--json").json
    text = " ".join(found["arguments"])
    assert text.startswith("vllm serve some/model --max-num-seqs 64 --scheduler-cls sagellm.adapters.vllm.")
    assert '{"sagellm": {"passes": "order=shortest"}}' in text
    assert '"cpu_bytes_to_use": 1024' in text
    assert '"eviction_policy": "qos{within=lru}"' in text


def test_values_are_those_of_the_engine(sage):
    for name, flag in (("vllm", "--kv-cache-dtype fp8"), ("tgi", "--kv-cache-dtype fp8_e4m3fn")):
        assert flag in sage("llm", "adapter", "show", name, "--model", "m", "--kv-cache-dtype", "fp8").out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("vllm", "--max-num-seqs", "4"), "give --model"),
        (("tgi", "--model", "m", "--scheduler-passes", "order=shortest"), "takes no passes"),
        (("vlm", "--model", "m"), "vllm"),
    ],
)
def test_what_cannot_be_exported_is_refused(sage, arguments, told):
    result = sage("llm", "adapter", "show", *arguments)
    assert result.code == 2
    assert told in result.err
