"""What generation_config.json sets is applied as transformers does, or said not to be."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sagellm.core import CheckpointError, ModelGeometry
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.cli.model import params_of
from sagellm.engines.loading import GenerationDefaults
from sagellm.engines.models.quiet import quiet_transformers
from sagellm.engines.sampling.params import PARAMETERS
from sagellm.server.http.body_params import chat_params, completion_params
from sagellm.server.http.body_schema import ChatBody, CompletionBody

PROMPT = list(range(5, 30))
SIZES = ModelGeometry(
    num_layers=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=100,
    max_model_len=64,
)


def read(values: dict[str, Any], config: dict[str, Any] | None = None) -> GenerationDefaults:
    return GenerationDefaults.read(values, config or {}, SIZES)


def test_settings_are_read_and_greedy_is_a_temperature_of_0():
    found = read({"temperature": 1, "top_k": 5, "max_new_tokens": 7}, {"eos_token_id": 3})
    assert found == GenerationDefaults(temperature=1.0, top_k=5, max_tokens=7, eos_token_ids=frozenset({3}))
    greedy = read({"do_sample": False, "temperature": 0.6, "eos_token_id": [1, None]})
    assert (greedy.temperature, greedy.eos_token_ids) == (0.0, {1})


def test_without_a_generation_config_the_config_says_what_ends_a_text():
    assert read({}, {"text_config": {"eos_token_id": 4}}).eos_token_ids == {4}
    both = {"eos_token_id": [2], "text_config": {"eos_token_id": 4}}
    assert read({}, both).eos_token_ids == {2}
    assert read({"eos_token_id": 1}, both).eos_token_ids == {1}
    assert read({}, {"text_config": None}).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    "values",
    [
        *(
            {"temperature": "hot"},
            {"top_k": 2.5},
            {"top_p": True},
            {"eos_token_id": -1},
            {"eos_token_id": "a"},
        ),
        *({"min_new_tokens": "2"}, {"stop_strings": [1]}, {"stop_strings": {"a": 1}}),
        *({"suppress_tokens": 1}, {"suppress_tokens": [True]}, {"suppress_tokens": ["a"]}),
        *({"bad_words_ids": [1]}, {"bad_words_ids": {"a": 1}}),
    ],
)
def test_settings_of_the_wrong_type_are_refused(values):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(values))} is "):
        read(values)


@pytest.mark.parametrize("words", [[[]], [["a"]], [[1.0]], [[True]]])
def test_a_bad_word_is_a_list_of_token_ids(words):
    with pytest.raises(CheckpointError, match=r"bad_words_ids has .* must hold lists of token ids"):
        read({"bad_words_ids": words})


def test_what_requests_would_have_to_carry_is_limited():
    with pytest.raises(CheckpointError, match="8,193 tokens; there may be at most 8,192"):
        read({"bad_words_ids": [[1] * 8193]})


def test_words_that_cannot_be_generated_or_end_the_text_are_left_out():
    values = {
        "eos_token_id": [3, 4],
        "suppress_tokens": [-1, 5, 100, 5],
        "bad_words_ids": [[3], [4, 3], [7, 100], [6, 7], [6, 7]],
    }
    assert read(values).bad_words_token_ids == ((5,), (4, 3), (6, 7))


def test_every_default_is_a_parameter_of_requests():
    names = {each for each in GenerationDefaults.__dataclass_fields__ if each != "eos_token_ids"}
    assert names <= SamplingParams.__dataclass_fields__.keys()
    told = {name for name, each in PARAMETERS.items() if each.is_of_checkpoint}
    assert told == names - {"max_tokens", "bad_words_token_ids"}, "what --help says"


NEUTRAL: dict[str, Any] = {
    **{"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "encoder_repetition_penalty": 1.0},
    **{"forced_bos_token_id": None, "begin_suppress_tokens": [], "max_length": 20, "guidance_scale": 1},
    **{"renormalize_logits": True, "length_penalty": 2.0, "use_cache": False, "num_return_sequences": 1},
    **{"pad_token_id": 0, "transformers_version": "5.24.0", "output_scores": True, "penalty_alpha": 0.0},
}


def test_settings_that_change_nothing_are_not_mentioned(caplog):
    read(NEUTRAL)
    read({"max_length": 64})  # the model takes no more
    read({"max_length": 30, "max_new_tokens": 10})
    read({"do_sample": False, "typical_p": 0.5, "eta_cutoff": 1e-3})
    assert not caplog.records


def test_settings_that_are_not_applied_are_named_once(caplog):
    values = {
        **{"no_repeat_ngram_size": 3, "num_beams": 4, "forced_bos_token_id": 0, "min_length": 5},
        **{"typical_p": 0.9, "epsilon_cutoff": 3e-4, "penalty_alpha": 0.6, "renormalize_logits": True},
        **{"max_length": 30, "begin_suppress_tokens": [1, 2], "sequence_bias": [[[1], 2.0]]},
    }
    read(NEUTRAL | values)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for name, value in values.items():
        assert (f"{name}={value!r}" in record.getMessage()) == (name != "renormalize_logits")


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def engine_with(path: Path, **settings: Any) -> LLMEngine:
    file = path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": False} | settings))
    return LLMEngine(model=str(path), device="cpu", dtype="float32", num_blocks=32)


def theirs(path: Path) -> list[int]:
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    return list(out[0, len(PROMPT) :].tolist())


def test_tokens_are_those_of_transformers_with_the_same_settings(copy):
    """Each setting decides about some token of the text without it."""
    limits = {"max_new_tokens": 12}
    plain = theirs_with(copy, limits)
    settings = {
        "eos_token_id": plain[1],
        "min_new_tokens": 4,
        "suppress_tokens": [plain[2]],
        "bad_words_ids": [[plain[0]], [plain[1]]],
    }
    for number in range(1, len(settings) + 1):
        chosen = limits | dict(list(settings.items())[:number])
        output = engine_with(copy, **chosen).generate(PROMPT)[0].outputs[0]
        assert list(output.token_ids) == theirs(copy), chosen
    longer = theirs_with(copy, limits | {"bad_words_ids": [plain[3:5]]})
    assert longer != plain
    assert (
        list(engine_with(copy, **limits, bad_words_ids=[plain[3:5]]).generate(PROMPT)[0].outputs[0].token_ids)
        == longer
    )


def theirs_with(path: Path, settings: dict[str, Any]) -> list[int]:
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False} | settings))
    return theirs(path)


def test_a_stop_string_of_the_checkpoint_ends_the_output(copy):
    engine = engine_with(copy, max_new_tokens=12)
    text = engine.generate("The river")[0].outputs[0].text
    stop = text[4:6]
    output = engine_with(copy, max_new_tokens=12, stop_strings=[stop]).generate("The river")[0].outputs[0]
    assert (output.finish_reason, output.text) == ("stop", text[: text.index(stop)])


def test_the_checkpoints_minimum_yields_to_a_requests_maximum(copy):
    engine = engine_with(copy, min_new_tokens=20, max_new_tokens=10)
    defaults = engine.default_params
    assert (defaults.min_tokens, defaults.max_tokens) == (10, 10)
    assert params_of(engine, {"max_tokens": 3}).min_tokens == 3
    assert params_of(engine, {"max_tokens": 30}).min_tokens == 10
    assert chat_params(ChatBody(messages=[], max_tokens=4), defaults).min_tokens == 4
    assert (
        completion_params(CompletionBody(prompt="a"), SamplingParams(min_tokens=90, max_tokens=90)).min_tokens
        == 16
    )
    assert len(engine.generate(PROMPT, defaults.overridden(max_tokens=2))[0].outputs[0].token_ids) == 2


def test_bad_words_of_a_request_come_on_top_of_the_checkpoints(copy):
    engine = engine_with(copy, suppress_tokens=[7])
    params = engine.default_params.overridden(bad_words=["e"])
    (word,) = engine.tokenizer("e")["input_ids"]
    words = engine.driver.input.process_request(PROMPT, params).params.bad_words_token_ids
    assert {(7,), (word,)} <= set(words)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"min_new_tokens": -3}, "generation_config.json: min_new_tokens is -3; "),
        ({"max_new_tokens": 0}, "generation_config.json: max_new_tokens is 0; "),
        ({"stop_strings": [""]}, "generation_config.json: stop_strings has ''; "),
        ({"top_p": 7.5}, "generation_config.json: top_p is 7.5; "),
    ],
)
def test_a_setting_out_of_range_is_named_as_in_the_file(copy, settings, told):
    with pytest.raises(CheckpointError, match=re.escape(told)):
        engine_with(copy, **settings)
