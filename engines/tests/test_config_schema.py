"""The configuration's values, limits, names and messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sagellm.core import ConfigError, ProviderSpec
from sagellm.core.protocols.scheduler_ir import STAGES
from sagellm.engines.config import EngineConfig, KVConfig, SchedulerConfig
from sagellm.engines.config.schema import PROVIDER_KINDS
from sagellm.engines.config.settings import ALL_NAMES, flag_of
from sagellm.engines.config.sources import load_config


def message(**flat):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat(**flat)
    return str(caught.value)


def test_every_setting_but_the_stages_of_passes_has_one_flat_name():
    stages = {f"scheduler.{stage}" for stage in STAGES}  # scheduler.passes names those too
    assert sorted(ALL_NAMES.values()) == sorted(EngineConfig().values().keys() - stages)


def test_every_named_provider_is_a_setting():
    assert set(PROVIDER_KINDS) <= set(EngineConfig().values())


def test_defaults_need_no_argument():
    config = EngineConfig()
    assert config == EngineConfig.from_flat()
    assert (config.kv.block_size, config.prefix_cache.enabled, config.scheduler.passes) == (16, True, ())


def test_flat_names_reach_their_sections():
    config = EngineConfig.from_flat(
        model=Path("/models/small"),
        gpu_memory_utilization=1,
        enable_prefix_caching=False,
        scheduler_passes=["first", "second"],
        attention_backend="naive",
    )
    assert config.model.name == "/models/small"
    assert config.kv.memory_fraction == 1.0
    assert config.prefix_cache.enabled is False
    assert config.scheduler.passes == (ProviderSpec("first"), ProviderSpec("second"))
    assert config.forward.attention == ProviderSpec("naive")


def test_passes_may_be_separated_by_commas():
    assert SchedulerConfig(passes="first, second").passes == (ProviderSpec("first"), ProviderSpec("second"))
    assert SchedulerConfig(passes="").passes == ()


def test_a_step_may_hold_fewer_tokens_than_sequences():
    config = EngineConfig.from_flat(max_num_batched_tokens=1, max_num_seqs=256)
    assert config.scheduler.max_num_batched_tokens == 1


@pytest.mark.parametrize("block_size", [1, 8, 16, 128, 1024])
def test_block_sizes_in_range_are_taken(block_size):
    assert KVConfig(block_size=block_size).block_size == block_size


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices_are_taken(device):
    assert EngineConfig.from_flat(device=device).model.device == device


@pytest.mark.parametrize(
    ("flat", "expected"),
    [
        ({"block_size": 0}, "kv.block_size is 0; it must be a whole number from 1 to 1024"),
        ({"block_size": 1025}, "kv.block_size is 1025; it must be a whole number from 1 to 1024"),
        ({"block_size": "16"}, "kv.block_size is '16'; it must be a whole number from 1 to 1024"),
        ({"block_size": None}, "kv.block_size is None; it must be a whole number from 1 to 1024"),
        ({"num_blocks": True}, "kv.num_blocks is True; it must be a whole number of at least 1, or null"),
        ({"max_num_seqs": 0}, "scheduler.max_num_seqs is 0; it must be a whole number of at least 1"),
        (
            {"dtype": "fp16"},
            "model.dtype is 'fp16'; it must be one of auto, float32 (or float), bfloat16, float16 (or half)",
        ),
        ({"device": "gpu"}, "model.device is 'gpu'; it must be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, "model.device is 'cuda:x'; it must be auto, cpu, cuda or cuda:N"),
        ({"model": ""}, "model.name (model) is ''; it must be a text that is not empty"),
        (
            {"scheduler_passes": "[mlfq"},
            "scheduler.passes cannot be read: its square brackets do not match",
        ),
        (
            {"scheduler_passes": 3},
            "scheduler.passes (scheduler_passes) cannot be read: it is 3; it must be a name, or a mapping "
            "{name: …, options: {…}}",
        ),
        (
            {"enable_prefix_caching": "maybe"},
            "prefix_cache.enabled (enable_prefix_caching) is 'maybe'; it must be true or false",
        ),
        (
            {"eviction_policy": {"name": "qos", "options": [1]}},
            "prefix_cache.eviction_policy cannot be read: the options of 'qos' must be a mapping of names to "
            "values",
        ),
    ],
)
def test_an_error_says_key_value_and_what_is_possible(flat, expected):
    assert message(**flat) == expected


def test_a_wrong_format_of_kv_is_told_every_name_that_is_taken():
    told = message(kv_cache_dtype="fp9").partition("one of ")[2]
    taken = told.replace(" (or ", ", ").replace(")", "").split(", ")
    assert taken == [
        "auto",
        "float32",
        "float",
        "bfloat16",
        "float16",
        "half",
        "int8",
        "float8_e4m3fn",
        "fp8",
    ]
    for name in taken:
        EngineConfig.from_flat(kv_cache_dtype=name)


def test_a_model_length_holds_a_token_of_the_prompt_and_one_of_the_output():
    assert message(max_model_len=1) == (
        "model.max_model_len is 1; it must be a whole number of at least 2, or null"
    )
    assert EngineConfig.from_flat(max_model_len=2).model.max_model_len == 2


@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan"), float("inf")])
def test_memory_fraction_is_a_share(value):
    text = message(gpu_memory_utilization=value)
    assert text.startswith("kv.memory_fraction (gpu_memory_utilization) is ")
    assert "a number above 0 and at most 1" in text


def test_all_errors_are_told_at_once():
    assert len(message(block_size=0, max_num_seqs=0, device="gpu").splitlines()) == 3


def test_an_unknown_flat_name_is_told_with_the_nearest():
    text = message(blok_size=8)
    assert text.startswith("unknown setting 'blok_size'; settings: model, ")
    assert text.endswith("Did you mean 'block_size'?")


def test_an_unknown_name_in_a_section_is_told_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"unknown setting 'kv\.blok_size'; kv has .*Did you mean 'block_size'\?"
    ):
        KVConfig(blok_size=8)


def test_an_unknown_section_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown section 'kvs'; the sections are .*Did you mean 'kv'\?"):
        EngineConfig(kvs={})


def test_a_flat_name_given_as_a_section_is_told_its_key():
    with pytest.raises(ConfigError, match=r"the setting is kv\.block_size"):
        EngineConfig(block_size=16)


def test_a_section_speaks_alike_alone_and_inside():
    with pytest.raises(ConfigError) as alone:
        KVConfig(block_size=0)
    with pytest.raises(ConfigError) as inside:
        EngineConfig(kv={"block_size": 0})
    assert str(alone.value) == str(inside.value)


def test_a_configuration_cannot_be_changed_but_copied():
    config = EngineConfig()
    with pytest.raises(ValidationError):
        config.kv = KVConfig(block_size=8)
    changed = config.with_values({"kv.num_blocks": 64})
    assert (config.kv.num_blocks, changed.kv.num_blocks) == (None, 64)
    assert changed.with_values({"kv.num_blocks": None}) == config


def test_a_copy_is_checked_like_the_first():
    with pytest.raises(ConfigError, match=r"kv\.num_blocks is 0"):
        EngineConfig().with_values({"kv.num_blocks": 0})
    with pytest.raises(ConfigError, match="unknown section 'kw'"):
        EngineConfig().with_values({"kw.num_blocks": 1})


def test_a_flag_is_the_flat_name_with_dashes():
    assert flag_of("max_num_batched_tokens") == "--max-num-batched-tokens"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lru", ProviderSpec("lru")),
        (" acme:lru ", ProviderSpec("acme:lru")),
        ("qos{within=reuse}", ProviderSpec("qos", {"within": "reuse"})),
        ("qos{ within: reuse }", ProviderSpec("qos", {"within": "reuse"})),
        (
            "qos{weights={gold=3, b: 1.5}, within=reuse}",
            ProviderSpec("qos", {"weights": {"gold": 3, "b": 1.5}, "within": "reuse"}),
        ),
        ("a{url='x://h?b,c=d', n=1}", ProviderSpec("a", {"url": "x://h?b,c=d", "n": 1})),
        ("{name: qos, options: {within: reuse}}", ProviderSpec("qos", {"within": "reuse"})),
        ({"name": "qos", "options": {"within": "reuse"}}, ProviderSpec("qos", {"within": "reuse"})),
    ],
)
def test_a_provider_takes_options_in_three_forms(text, expected):
    assert EngineConfig.from_flat(eviction_policy=text).prefix_cache.eviction_policy == expected


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "swap", "n": 3, "x": 0.5}, {"a": None}, {"c": "true", "d": "x, y{", "e": {"f": [1, "g"]}}],
)
def test_a_provider_is_written_as_it_is_read(options):
    spec = ProviderSpec("a-pass", options)
    assert ProviderSpec.of(spec.text) == spec


@pytest.mark.parametrize("text", ["a{x=1", "a x=1}", "a{x=1}}b"])
def test_braces_that_do_not_match_are_said(text):
    with pytest.raises(ConfigError, match=r"the braces after 'a.*' do not match"):
        ProviderSpec.of(text)


@pytest.mark.parametrize(
    "text",
    [
        "a{x=1, y=[1, 2]},b",
        "[{name: a, options: {x: 1, y: [1, 2]}}, b]",
        ["a{x=1, y=[1, 2]}", "b"],
        [{"name": "a", "options": {"x": 1, "y": [1, 2]}}, ProviderSpec("b")],
    ],
)
def test_providers_of_a_list_take_options_too(text):
    passes = EngineConfig.from_flat(scheduler_passes=text).scheduler.passes
    assert passes == (ProviderSpec("a", {"x": 1, "y": [1, 2]}), ProviderSpec("b"))


@pytest.mark.parametrize(
    "tiers",
    [
        {"host": "1KiB", "file": {"max_bytes": 5, "folder": "/x"}},
        "{host: 1KiB, file: {max_bytes: 5, folder: /x}}",
        "host{max_bytes=1KiB},file{max_bytes=5,folder=/x}",
        [{"name": "host", "options": {"max_bytes": 1024}}, "file{max_bytes=5, folder=/x}"],
    ],
)
def test_tiers_are_a_list_like_others_or_a_mapping(tiers):
    assert EngineConfig.from_flat(kv_tiers=tiers).kv.tiers == (
        ProviderSpec("host", {"max_bytes": 1024}),
        ProviderSpec("file", {"max_bytes": 5, "folder": "/x"}),
    )


def test_options_may_stand_beside_the_name_of_a_section():
    config = EngineConfig(prefix_cache={"options": {"max_ghost_blocks": 1}}, engine={"name": "acme"})
    assert config.prefix_cache.name == ProviderSpec("radix", {"max_ghost_blocks": 1})
    assert EngineConfig.from_values(config.values()) == config
    with pytest.raises(ConfigError, match=r"unknown setting 'kv\.options'"):
        EngineConfig(kv={"options": {}})


def test_a_provider_named_anew_has_none_of_the_options_of_the_other(tmp_path):
    (tmp_path / "sagellm.yaml").write_text("prefix_cache: {name: radix, options: {max_ghost_blocks: 1}}")
    load = {"directory": tmp_path, "environ": {"HOME": str(tmp_path)}}
    assert load_config({}, **load).config.prefix_cache.name.options == {"max_ghost_blocks": 1}
    assert load_config({"prefix_cache": "radix"}, **load).config.prefix_cache.name == ProviderSpec("radix")
