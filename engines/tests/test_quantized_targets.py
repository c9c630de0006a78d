"""Targets of compressed-tensors name modules as the library has it, and cannot make loading take long."""

from __future__ import annotations

import pytest

from sagellm.core import CheckpointError
from sagellm.engines.loading.quantized.targets import TargetMatcher

NAME = "model.layers.10.mlp.experts.3.gate_proj"


@pytest.mark.parametrize(
    ("target", "is_match"),
    [
        (NAME, True),
        ("model.layers.10", False),
        ("re:model.layers.10", True),
        ("re:layers", False),
        ("re:.*mlp.*gate.*", True),
        (r"re:.*\.(gate|up)_proj$", True),
        (r"re:^(?!.*self_attn).*mlp.*", True),
        (r"re:model\.layers\.[0-9]+\.mlp.*", True),
        ("re:(.*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj)", True),
        (r"re:.*\(\)*", False),
    ],
)
def test_targets_name_modules(target, is_match):
    assert TargetMatcher("config.json").matches(NAME, target) == is_match


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("re:(", "is not a valid pattern"),
        ("re:(a+)+$", "repeats a group"),
        ("re:(?:a|aa){1,99}$", "repeats a group"),
        ("re:.*.*.*.*.*x", "more than 4 times in a row"),
        ("re:(a*|b)(a*|b)(a*|b)(a*|b)(a*|b)x", "more than 4 times in a row"),
        ("re:" + "a" * 501, "is longer than 500 characters"),
    ],
)
def test_patterns_that_may_take_long_are_refused(target, message):
    with pytest.raises(CheckpointError, match=rf"config\.json: the target 're:.* {message}"):
        TargetMatcher("config.json").matches(NAME, target)


def test_all_patterns_together_have_a_limit_of_time():
    matcher = TargetMatcher("config.json", clock=iter(range(100)).__next__)
    assert [matcher.matches(NAME, "re:.*gate.*") for _ in range(10)] == [True] * 10
    with pytest.raises(CheckpointError, match="takes too long: all targets together may take 10 s"):
        matcher.matches(NAME, "re:.*gate.*")


def test_the_slowest_pattern_ends_for_a_name_of_any_length():
    assert not TargetMatcher("config.json").matches("a" * 1_000_000, "re:.*a.*a.*ab")
