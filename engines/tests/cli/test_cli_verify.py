"""`verify`: an engine is compared with transformers, and one with a bug is found out."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from sagellm.engines.cli import verify
from sagellm.engines.testing import make_checkpoint

SMALL = ("--num-blocks", "512", "--device", "cpu", "--max-tokens", "12")
# Attends with a scale that is one percent too large, as a constant that was typed by hand might be.
LOUD = """
from dataclasses import replace

from sagellm.core import Provider, hookimpl
from sagellm.engines.attention.naive import TorchNaiveBackend

class Loud(TorchNaiveBackend):
    def forward(self, query, key, value, layer_kv, plan, spec):
        return super().forward(query, key, value, layer_kv, plan, replace(spec, scale=spec.scale * 1.01))

@hookimpl
def sagellm_providers():
    return [Provider("attention_backend", "loud", f"{__name__}:Loud", "a little too loud")]
"""
BY_TORCH = ("--forward-backend", "torch", "--attention-backend")


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "olmo2", "mixtral"])
def test_a_model_of_each_family_gives_the_tokens_of_transformers(sage, tmp_path, family):
    path = make_checkpoint(tmp_path / family, family=family, seed=5)
    result = sage("llm", "verify", str(path), *SMALL, "--json")
    assert result.code == 0, result.err
    assert result.json["verdict"] in ("equal", "ties")
    assert (result.json["dtype"], result.json["tie_margin"]) == ("float32", 0.001)
    assert result.json["num_tokens"] == 12 * len(result.json["prompts"])
    assert {each["verdict"] for each in result.json["prompts"]} <= {"equal", "ties"}


def test_a_plugin_with_a_bug_is_found_with_the_first_difference_and_its_margin(sage, checkpoint, install):
    install("loud-plugin", LOUD)
    long = ("--max-tokens", "32")
    assert sage("llm", "verify", str(checkpoint), *SMALL, *long, *BY_TORCH, "naive").code == 0
    result = sage("llm", "verify", str(checkpoint), *SMALL, *long, *BY_TORCH, "loud", "--json")
    assert (result.code, result.json["verdict"]) == (1, "different")
    found = next(each for each in result.json["prompts"] if each["verdict"] == "different")
    first = next(each for each in found["differences"] if each["margin"] >= 0.001)
    assert found["token_ids"][first["place"]] == first["token_id"] != first["reference_token_id"]
    assert first["margin"] == pytest.approx(first["reference_logprob"] - first["logprob"])


def test_a_difference_is_told_with_both_tokens_and_what_to_do(sage, checkpoint, install):
    install("loud-plugin", LOUD)
    result = sage("llm", "verify", str(checkpoint), *SMALL, "--max-tokens", "32", *BY_TORCH, "loud")
    assert result.code == 1
    assert "of the answer is" in result.out
    assert "not a tie" in result.out
    assert "In float32 that is an error" in result.out.splitlines()[-1]


def test_in_16_bits_a_small_difference_is_a_tie_and_a_margin_can_be_chosen(sage, checkpoint, install):
    install("loud-plugin", LOUD)
    loud = (*SMALL, *BY_TORCH, "loud", "--tie-margin", "1000")
    assert sage("llm", "verify", str(checkpoint), *loud).code == 0
    result = sage("llm", "verify", str(checkpoint), *SMALL, "--dtype", "bfloat16", "--json")
    assert (result.json["dtype"], result.json["tie_margin"]) == ("bfloat16", 0.25)


def test_with_quantized_weights_it_counts_what_agrees_and_gives_no_verdict(sage, checkpoint):
    result = sage("llm", "verify", str(checkpoint), *SMALL, "--quantization", "int8", "--tie-margin", "0")
    assert result.code == 0, result.err
    assert "of 120 tokens agree with transformers in float32. Weights or KV are rounded" in result.out


def test_prompts_come_from_a_file(sage, checkpoint, tmp_path):
    (tmp_path / "prompts.txt").write_text("Once upon a time\nIn the end\n")
    result = sage("llm", "verify", str(checkpoint), *SMALL, "--prompts", tmp_path / "prompts.txt", "--raw")
    assert result.code == 0, result.err
    assert "Once upon a time" in result.out
    assert result.out.splitlines()[-1] == "all 24 tokens of 2 answers equal transformers' in float32"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompts", "missing.txt"), "the prompts in missing.txt cannot be read: No such file"),
        (("--dtype", "int3"), "dtype"),
        (("--max-tokens", "0"), "--max-tokens"),
    ],
)
def test_bad_flags_are_used_wrongly(sage, flags, words):
    result = sage("llm", "verify", "--num-blocks", "64", *flags)
    assert result.code == 2
    assert words in result.err


def test_without_transformers_it_says_what_to_install(sage, monkeypatch):
    monkeypatch.setattr(verify, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    result = sage("llm", "verify")
    assert result.code == 2
    assert "pip install 'transformers>=5'" in result.err
