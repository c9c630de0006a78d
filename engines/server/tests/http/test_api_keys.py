"""Lines of a key file: options, and mistakes that name the line but none of its words."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from sagellm.core import ConfigError
from sagellm.engines.config import ServerConfig
from sagellm.server.http import check_access
from sagellm.server.http.api_key_file import with_key_file
from sagellm.server.http.api_keys import ApiKey, parse_keys

SECRET = "sk-very-secret"


def test_a_key_alone_has_no_options():
    assert ApiKey.parse(f"  {SECRET}\t", "line 1") == ApiKey(key=SECRET)


def test_options_follow_the_key_in_any_order():
    text = f"{SECRET} trusted max_tokens=100000\tmax_requests=8  weight=0.5 name=red.team-1"
    assert ApiKey.parse(text, "line 1") == ApiKey(
        key=SECRET, name="red.team-1", weight=0.5, is_trusted=True, max_requests=8, max_tokens=100_000
    )


def test_a_key_may_contain_an_equals_sign():
    assert ApiKey.parse("c2VjcmV0== weight=2", "line 1").key == "c2VjcmV0=="


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("hunter2", "word 2 is not an option"),
        ("weight=2 hunter2", "word 3 is not an option"),
        ("hunter2=5", "word 2 is not an option"),
        ("Weight=2", "word 2 is not an option"),
        ("trusted=yes", "word 2 is not an option"),
        ("weight", "word 2 is not an option"),
        ("name=", "name must be 1 to 64"),
        ("name=-x", "name must be"),
        ('name=a"b', "name must be"),
        ("name=" + "a" * 65, "name must be"),
        ("name=réd", "name must be"),
        ("weight=", "weight must be a number from 0.001 to 1000"),
        ("weight=0", "weight must be"),
        ("weight=-1", "weight must be"),
        ("weight=nan", "weight must be"),
        ("weight=inf", "weight must be"),
        ("weight=1e9", "weight must be"),
        ("max_requests=0", "max_requests must be a whole number"),
        ("max_requests=-1", "max_requests must be"),
        ("max_requests=1.5", "max_requests must be"),
        ("max_requests=٣", "max_requests must be"),
        ("max_tokens=" + "9" * 5000, "max_tokens must be"),
        ("weight=1 weight=1", "has the option weight twice"),
        ("trusted trusted", "has the option trusted twice"),
    ],
)
def test_a_mistake_is_told_without_the_words(options, told):
    with pytest.raises(ConfigError) as caught:
        ApiKey.parse(f"{SECRET} {options}", "line 7")
    assert str(caught.value).startswith("line 7")
    assert told in str(caught.value)
    for word in (SECRET, "hunter2", "9" * 20):
        assert word not in str(caught.value)


@pytest.mark.parametrize("text", ["weight=2 sk-a", "name=red", "trusted", "max_tokens="])
def test_an_option_in_place_of_the_key_is_a_mistake(text):
    with pytest.raises(ConfigError, match="line 1 begins with an option; the key comes first"):
        ApiKey.parse(text, "line 1")


@given(st.text().filter(str.strip))
def test_any_text_is_a_key_or_an_error_that_does_not_repeat_it(text):
    try:
        key = ApiKey.parse(text, "line 1")
    except ConfigError as error:
        told = str(error)
        assert told.startswith("line 1")
        assert not [
            word
            for word in text.split()
            if len(word) > 8 and word.partition("=")[2] not in ("", word) and word in told
        ]
    else:
        assert key.key == text.split()[0]
        assert key.key not in repr(key).replace("key=", "") or len(key.key) < 9


def test_a_file_names_the_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\nsk-a name=a\n{SECRET} wieght=2\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="line 4: word 2 is not an option") as caught:
        with_key_file(ServerConfig(api_key_file=path), warn=pytest.fail)
    assert SECRET not in str(caught.value)


def test_options_reach_the_settings(tmp_path):
    path = tmp_path / "keys"
    path.write_text("sk-a weight=2 # not a comment\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="line 1: word 3"):
        with_key_file(ServerConfig(api_key_file=path), warn=pytest.fail)
    path.write_text("sk-a weight=2\n")
    settings = with_key_file(ServerConfig(api_key_file=path, api_keys=("sk-b trusted",)), warn=pytest.fail)
    assert parse_keys(settings.api_keys) == [
        ApiKey(key="sk-b", is_trusted=True),
        ApiKey(key="sk-a", weight=2.0),
    ]


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (("sk-a", "sk-b", "sk-a weight=2"), "entry 3 .* is the key of entry 1 with other options"),
        (("sk-a name=x", "sk-b name=x"), "entry 2 .* has the name of entry 1"),
        (("sk-a", "  "), "entry 2 .* is empty"),
    ],
)
def test_contradictions_are_found_before_a_model_is_loaded(entries, told):
    with pytest.raises(ConfigError, match=told) as caught:
        check_access(ServerConfig(api_keys=entries))
    assert "sk-" not in str(caught.value)


def test_the_same_entry_twice_is_one_key():
    assert len(parse_keys(("sk-a name=x", "sk-a  name=x"))) == 1
