"""Options of providers: how they are written, checked against a factory's signature, and passed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest

from sagellm.core import (
    KINDS,
    ConfigError,
    PluginError,
    PluginRegistry,
    ProviderSpec,
    QuantizationConfig,
    QuantizationGranularity,
)
from sagellm.core.plugins.option_text import split
from sagellm.core.plugins.options import ChosenProvider, Limits
from sagellm.core.protocols.scheduler_ir import NullSchedulerPass

if TYPE_CHECKING:
    from nowhere import Unresolvable  # type: ignore[import-not-found]


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Order:
    """What a scheduler pass is: a frozen dataclass whose fields are its options."""

    by: str
    ageing_s: float = 30.0


class Policy:
    def __init__(
        self,
        *,
        share: float = 0.5,
        num: int | None = None,
        mode: Literal["a", "b"] = "a",
        colour: Colour = Colour.RED,
        folder: Path | None = None,
        names: Sequence[str] = (),
        pairs: Mapping[str, int] | None = None,
        other: Unresolvable = None,
        lifetime_predictor: object = None,
        _private: int = 0,
    ) -> None:
        self.given = dict(locals())


def chosen(factory: Any, kind: str = "eviction_policy", **options: Any) -> ChosenProvider:
    return ChosenProvider(kind, ProviderSpec("mine", options), "mine of acme 1", factory)


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        ("lru", ProviderSpec("lru")),
        ({"name": "lru"}, ProviderSpec("lru")),
        ({"name": "qos", "options": {"a": 1}}, ProviderSpec("qos", {"a": 1})),
        ({"name": "qos", "options": None}, ProviderSpec("qos")),
    ],
)
def test_a_setting_is_a_name_or_a_name_with_options(value, spec):
    assert ProviderSpec.of(value) == spec
    assert ProviderSpec.of(spec.plain()) == spec


@pytest.mark.parametrize(
    "value", [3, None, "", [], {}, {"options": {}}, {"name": 3}, {"name": "a", "option": {}}]
)
def test_what_is_neither_is_refused(value):
    with pytest.raises(ConfigError, match="it must be"):
        ProviderSpec.of(value)


def test_a_message_about_a_wrong_form_shows_no_value_that_may_be_a_secret():
    with pytest.raises(ConfigError) as caught:
        ProviderSpec.of({"name": "redis", "url": "redis://:secret@host"})
    assert "has name, url" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_options_reach_the_factory_beside_what_the_engine_passes():
    made = chosen(Policy, share=1, num=None, folder="/x", colour="red").make(lifetime_predictor="new")
    assert made.given["share"] == 1.0
    assert isinstance(made.given["share"], float)
    assert (made.given["folder"], made.given["colour"]) == (Path("/x"), Colour.RED)
    assert made.given["lifetime_predictor"] == "new"
    assert chosen(Order, "scheduler_pass", by="age", ageing_s=3).make() == Order("age", 3.0)


def test_an_option_may_have_any_name():
    made = chosen(lambda *, plugin, call, function: (plugin, call, function), plugin=1, call=2, function=3)
    assert made.make() == (1, 2, 3)


def test_a_keyword_of_the_engine_that_a_factory_does_not_have_is_left_out():
    assert chosen(Order, "scheduler_pass", by="age").make(clock=None) == Order("age")
    assert chosen(lambda **rest: rest, clock=1).make(lifetime_predictor=2) == {
        "clock": 1,
        "lifetime_predictor": 2,
    }
    assert chosen(lambda: "nothing").make(lifetime_predictor=2) == "nothing"
    assert chosen(dict).make(lifetime_predictor=2) == {"lifetime_predictor": 2}  # C, without a signature


def test_an_unknown_option_is_told_with_all_there_are_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        chosen(Order, "scheduler_pass", by="age", ageing=3).check()
    assert str(caught.value) == (
        "scheduler_pass 'mine' has no option 'ageing'; it takes by (a text; required), "
        "ageing_s (a number; default 30.0). Did you mean 'ageing_s'?"
    )


@pytest.mark.parametrize("name", ["lifetime_predictor", "_private"])
def test_what_the_engine_passes_is_not_an_option(name):
    assert name not in {each.name for each in chosen(Policy).options()}
    with pytest.raises(ConfigError, match=f"has no option {name!r}"):
        chosen(Policy, **{name: 1}).check()


def test_a_missing_option_is_told():
    with pytest.raises(ConfigError, match=r"'mine' needs the option by \(a text; required\)"):
        chosen(Order, "scheduler_pass").make()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share", "1"),
        ("share", True),
        ("num", 1.5),
        ("num", True),
        ("mode", "c"),
        ("colour", "blue"),
        ("folder", 3),
        ("names", "ab"),
        ("pairs", [1]),
    ],
)
def test_a_value_of_another_type_is_told_with_the_type(name, value):
    with pytest.raises(ConfigError, match=f"'mine': {name} is .*; it must be "):
        chosen(Policy, **{name: value}).check()


class Limited:
    def __init__(
        self,
        *,
        share: Annotated[float, Limits(ge=0, le=1)] = 0.5,
        num: Annotated[int, Limits(gt=0)] | None = None,
        size: Annotated[int, SimpleNamespace(lt=9)] = 1,
    ) -> None:
        if share == num:
            raise ConfigError("share is num; give another")
        if num == 13:
            raise ConfigError("thirteen is refused")


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("share", 1.5, "a number from 0 to 1"),
        ("share", True, "a number from 0 to 1"),
        ("share", math.nan, "a number from 0 to 1"),
        ("num", 0, "a whole number above 0, or null"),
        ("num", "x", "a whole number above 0, or null"),
        ("size", 9, "a whole number below 9"),
    ],
)
def test_a_value_beyond_a_limit_reads_as_one_of_another_type(name, value, must):
    with pytest.raises(ConfigError) as caught:
        chosen(Limited, **{name: value}).check()
    assert str(caught.value) == f"eviction_policy 'mine': {name} is {value!r}; it must be {must}"
    assert {each.name: each.type for each in chosen(Limited).options()}[name] == must


def test_limits_hold_at_their_ends_and_infinity_is_beyond_one():
    assert chosen(Limited, share=1, num=1, size=8).check() == {"share": 1.0, "num": 1, "size": 8}
    for value in (math.inf, 10**400):
        with pytest.raises(ConfigError, match="share is"):
            chosen(Limited, share=value).check()


def test_an_option_that_its_class_refuses_is_told_like_others():
    with pytest.raises(ConfigError, match=r"^eviction_policy 'mine': share is num; give another$"):
        chosen(Limited, share=1, num=1).make()
    with pytest.raises(ConfigError, match=r"^thirteen is refused$"):
        chosen(Limited, num=13).make()


def test_fields_of_a_pass_are_checked_when_it_is_made():
    @dataclass(frozen=True)
    class Aged(NullSchedulerPass):
        ageing_s: Annotated[float, Limits(gt=0)] = 30.0

    assert Aged(ageing_s=1).ageing_s == 1
    with pytest.raises(ConfigError, match=r"^null: ageing_s is 0; it must be a number above 0$"):
        Aged(ageing_s=0)


def test_limits_of_inherited_fields_hold_where_their_names_are_unknown(tmp_path, monkeypatch):
    (tmp_path / "aged_pass.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from typing import Annotated\n"
        "from sagellm.core.plugins.options import Limits\n"
        "from sagellm.core.protocols.scheduler_ir import NullSchedulerPass\n"
        "@dataclass(frozen=True)\n"
        "class Aged(NullSchedulerPass):\n"
        "    ageing_s: Annotated[float, Limits(gt=0)] = 30.0\n"
    )
    (tmp_path / "own_pass.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from aged_pass import Aged\n"
        "@dataclass(frozen=True)\n"
        "class Own(Aged):\n"
        "    extra: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from own_pass import Own  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match="ageing_s is -1"):
        Own(ageing_s=-1)
    with pytest.raises(ConfigError, match="ageing_s is -1"):
        chosen(Own, ageing_s=-1).check()


def test_a_pass_calls_the_post_init_of_what_it_also_is():
    class Counted:
        def __post_init__(self):
            made.append(self)

    @dataclass(frozen=True)
    class Both(NullSchedulerPass, Counted):
        what: str = None  # type: ignore[assignment]  # a default is taken as it is

    made: list[object] = []
    assert made == [Both()]


@pytest.mark.parametrize("metadata", [Limits(gt=0), SimpleNamespace(metadata=[SimpleNamespace(gt=0)])])
def test_limits_of_a_union_are_those_of_its_numbers(metadata):
    def factory(*, num=None): ...

    factory.__annotations__["num"] = Annotated[float | None, metadata]
    assert chosen(factory, num=None).check() == {"num": None}
    with pytest.raises(ConfigError, match="num is -5; it must be a number above 0, or null"):
        chosen(factory, num=-5).check()


def test_lists_of_providers_may_be_quoted_and_must_end():
    assert split('["lru", \'mlfq\', qos{within="a,b"}]') == ["lru", "mlfq", 'qos{within="a,b"}']
    for text in ("[lru", "lru]"):
        with pytest.raises(ConfigError, match="its square brackets do not match"):
            split(text)


@pytest.mark.parametrize(
    "text", ["a{x=1, x=1}", "a{x=1, 'x': 2}", "{name: a, options: {x: 1, x: 2}}", "a{y={x=1,x=2}}"]
)
def test_a_name_given_twice_is_an_error_that_says_so(text):
    with pytest.raises(ConfigError, match="'x' is given twice; keep one"):
        ProviderSpec.of(text)


def test_a_type_that_cannot_be_resolved_is_not_checked():
    assert chosen(Policy, other=object).make().given["other"] is object


def test_a_value_of_a_kind_with_secrets_is_not_shown():
    with pytest.raises(ConfigError, match="by is of type int; it must be a text"):
        chosen(Order, "kv_tier", by=4711).check()


def test_fields_of_the_config_of_a_kind_are_options_of_all_its_providers():
    registry = PluginRegistry.load()
    spec = ProviderSpec("null", {"granularity": "per_group", "group_size": 64})
    config = registry.make("quantizer", spec)._config
    assert (config.granularity, config.group_size) == (QuantizationGranularity.PER_GROUP, 64)
    with pytest.raises(ConfigError, match=r"has no option 'group'.*Did you mean 'group_size'"):
        registry.make("quantizer", ProviderSpec("null", {"group": 64}))


class Grouped:
    default_config = QuantizationConfig(granularity=QuantizationGranularity.PER_GROUP, group_size=32)

    def __init__(self, config=None, *, depth: int = 1):
        self.config = config


def test_fields_that_no_option_names_are_the_provider_s_own():
    assert chosen(Grouped, "quantizer", depth=2).make().config is None
    config = chosen(Grouped, "quantizer", clip_ratio=0.5).make().config
    assert config == replace(Grouped.default_config, clip_ratio=0.5)
    told = {each.name: each.default for each in chosen(Grouped, "quantizer").options()}
    assert told == {"clip_ratio": 1.0, "group_size": 32, "granularity": "per_group", "depth": 1}


def test_options_are_described_with_what_holds():
    told = chosen(Order, "scheduler_pass", by="age").described()
    assert told == "ageing_s=30.0, by=age"
    assert chosen(Order, "kv_tier", by="secret").described() == "ageing_s=30.0, by=…"


def test_a_factory_that_fails_is_named():
    def fail(**_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(PluginError, match="mine of acme 1: its factory failed; RuntimeError: no"):
        chosen(fail).make()


def test_a_factory_that_returns_nothing_is_named():
    with pytest.raises(PluginError, match="mine of acme 1: its factory returned None"):
        chosen(lambda **_: None).make()


def test_every_installed_provider_says_its_options():
    registry = PluginRegistry.load()
    for entry in registry.providers():
        for option in registry.choose(entry.provider.kind, entry.qualified_name).options():
            assert option.name not in KINDS[entry.provider.kind].keywords
            assert "Unresolvable" not in option.type
