"""Our own reading of config.json gives what transformers' configuration classes give."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from sagellm.core import CheckpointError, ModelSpec, UnsupportedModelError
from sagellm.engines.models.decoder_spec import decoder_spec
from sagellm.engines.models.families import (
    DecoderFamily,
    LlamaFamily,
    MistralFamily,
    Qwen2Family,
    Qwen3Family,
)
from sagellm.engines.models.hf_config import read_hf_config

FAMILIES = (LlamaFamily(), MistralFamily(), Qwen2Family(), Qwen3Family())
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
ROPES: tuple[Any, ...] = (
    {},
    {"rope_theta": 5e5},
    {"rope_type": "default", "rope_theta": 1e6},
    {"type": "linear", "factor": 2.0},
    {"type": "linear"},
    {"rope_type": "linear", "factor": 4, "rope_theta": 1e5, "surprise": 1},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
    {"rope_type": "dynamic"},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None},
    {"type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": None, "attention_factor": 1.25, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": "much"},
    {"rope_type": "yarn", "original_max_position_embeddings": 32},
    {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": None, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    {"rope_type": "longrope", "factor": 2.0},
    {"rope_type": "cubic", "factor": 2.0},
    {"rope_type": None, "factor": 2.0},
    {"rope_type": ["linear"]},
    {"rope_theta": None},
    {"rope_theta": "wide"},
    {"rope_theta": -1.0},
    {"rope_theta": 1e300},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 1.0, "mrope_section": [1, 2]},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
    {"surprise": 1},
    None,
    "linear",
    ["linear"],
    5,
)
PLAIN: dict[str, tuple[Any, ...]] = {
    "vocab_size": (515, 100),
    "hidden_size": (64, 96),
    "intermediate_size": (168,),
    "num_hidden_layers": (1, 2, 3),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (8, 24, None),
    "max_position_embeddings": (64, 4096),
    "rms_norm_eps": (1e-5, 1e-6),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "use_sliding_window": (True, False),
    "sliding_window": (16, None),
    "max_window_layers": (0, 1, 2, -1),
    "layer_types": (None, ["full_attention"] * 3, ["sliding_attention", "attention", "full_attention"]),
    "rope_theta": (1e4, 1_000_000, None),
    "partial_rotary_factor": (None, 1.0),
    "original_max_position_embeddings": (32,),
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "per_layer_config": (None, {}),
}
HOSTILE: tuple[Any, ...] = (0, -1, 10**12, True, False, None, "", "64", [], [64], {}, {"a": {"b": [1]}})


def theirs(family: DecoderFamily, config: dict[str, Any]) -> ModelSpec:
    hf = read_hf_config({"model_type": family.model_type, **config})
    return decoder_spec(family.architecture, config, hf, family.traits(hf), frozenset())


def outcome(read: Callable[[], ModelSpec]) -> ModelSpec | str:
    """Return the spec, or how the config is refused; errors of another kind count as damaged."""
    try:
        return read()
    except UnsupportedModelError:
        return "unsupported"
    except Exception:
        return "damaged"


def generated(rng: random.Random, *, num_hostile: int) -> dict[str, Any]:
    """Make a config of which some entries are missing, and some have a value that means nothing."""
    chances = dict.fromkeys(PLAIN, 0.5) | {"layer_types": 0.1, "rope_parameters": 0.2, "rope_scaling": 0.2}
    config = SMALL | {name: rng.choice(PLAIN[name]) for name in PLAIN if rng.random() < chances[name]}
    # transformers' Qwen2 does not judge a head_dim.
    for name in rng.sample(sorted(PLAIN.keys() - {"head_dim"}), num_hostile):
        config[name] = rng.choice(HOSTILE)
    return config


def check(family: DecoderFamily, config: dict[str, Any]) -> ModelSpec | str:
    """Compare both readings. What our decoder lacks, transformers' own classes are asked for next."""
    own, expected = outcome(lambda: family.spec(config)), outcome(lambda: theirs(family, config))
    assert own == expected or (own, expected) == ("unsupported", "damaged"), config
    return own


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.model_type))
def test_generated_configs_give_the_spec_that_transformers_gives(family):
    rng = random.Random(family.model_type)
    outcomes = [check(family, generated(rng, num_hostile=0)) for _ in range(120)]
    assert isinstance(check(family, {"num_hidden_layers": 2}), ModelSpec)  # all defaults
    outcomes += [check(family, SMALL | {"rope_parameters": rope}) for rope in ROPES]
    outcomes += [check(family, SMALL | {"rope_scaling": rope, "rope_theta": 9e4}) for rope in ROPES]
    assert sum(isinstance(each, ModelSpec) for each in outcomes) > 80
    assert {"unsupported", "damaged"} < set(map(str, outcomes))


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.model_type))
def test_thousands_of_generated_configs_give_the_spec_that_transformers_gives(family):
    rng = random.Random(f"{family.model_type} again")
    for number in range(3000):
        check(family, generated(rng, num_hostile=number % 3))


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer"),
        ({"hidden_size": True}, "hidden_size is True; it must be an integer"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; it must be an integer"),
        ({"hidden_size": -64}, "hidden_size is -64; it must be at least 1"),
        ({"hidden_size": 66}, "hidden_size is 66, not a multiple of num_attention_heads, 4"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; at most 10000 can be"),
        ({"head_dim": {"a": [1]}}, "head_dim is {'a': [1]}; it must be an integer or null"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0; it must be true or false"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'; it must be a floating-point number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a small number, at least 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; it must be a small number, at least 0"),
        ({"layer_types": ["full_attention", 1, 2]}, "must be a list of texts or null"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 3"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object or null"),
        ({"rope_parameters": []}, "rope_parameters is []; it must be an object or null"),
        ({"rope_scaling": {"type": "dynamic"}}, "no factor; rope_type 'dynamic' needs factor"),
        ({"per_layer_config": [1]}, "per_layer_config is [1]; it must be an object or null"),
    ],
)
def test_an_error_says_which_entry_has_which_value_and_what_is_possible(entries, told):
    with pytest.raises(CheckpointError, match=re.escape(told)):
        LlamaFamily().spec(SMALL | entries)


def test_a_config_of_another_model_type_has_the_defaults_of_that_type():
    config = SMALL | {"model_type": "qwen2", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    config |= {"intermediate_size": 168, "num_key_value_heads": 4}
    spec = MistralFamily().spec(config)
    assert spec.geometry.vocab_size == CONFIG_MAPPING["qwen2"]().vocab_size
