"""`plugins list`, `info` and `check`, with plugins that work and plugins that do not."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from sagellm.core import PluginRegistry
from sagellm.engines import __version__
from sagellm.engines.cli.names import complete_kind, complete_plugin, complete_providers
from sagellm.engines.cli.plugins import CORE

WORKING = """
from sagellm.core import Provider, hookimpl

class Policy:
    '''Evicts by the moon.

    More about it.
    '''

@hookimpl
def sagellm_providers():
    return [
        Provider("eviction_policy", "moon", f"{__name__}:Policy", "by the moon"),
        Provider("eviction_policy", "mars", "absent_module:Policy", "by the planet"),
    ]
"""
THIEVES = """
from sagellm.core import Provider, hookimpl
from sagellm.core.protocols.kv_allocator import NullKVAllocator

class Moon(NullKVAllocator):
    def free(self, block_ids):
        pass

class Mars(Moon):
    pass

@hookimpl
def sagellm_providers():
    return [Provider("kv_allocator", name.lower(), f"{__name__}:{name}", "") for name in ("Moon", "Mars")]
"""
WITH_OPTIONS = """
from sagellm.core import Provider, hookimpl
from sagellm.core.protocols.eviction import NullEvictionPolicy

class Moon(NullEvictionPolicy):
    def __init__(self, phase):
        assert phase == "full"

@hookimpl
def sagellm_providers():
    return [Provider("eviction_policy", name, f"{__name__}:Moon", "") for name in ("moon", "mars")]
"""
BROKEN = "raise RuntimeError('no moon tonight')"
FUTURE = "SAGELLM_API = 99"
NULL_POLICY = ("eviction_policy", "null", "sagellm-core-protocols")


def test_list_has_a_row_for_each_provider(sage, install):
    install("moon-plugin", WORKING)
    rows = [line.split() for line in sage("plugins", "list").out.splitlines()]
    assert rows[0] == ["KIND", "NAME", "DISTRIBUTION", "VERSION", "SUMMARY"]
    assert ["eviction_policy", "moon", "moon-plugin", "1.5", "by", "the", "moon"] in rows
    assert NULL_POLICY in [tuple(row[:3]) for row in rows]


def test_list_can_be_limited_to_a_kind(sage):
    entries = sage("plugins", "list", "--kind", "eviction_policy", "--json").json["providers"]
    assert {entry["kind"] for entry in entries} == {"eviction_policy"}


def test_an_unknown_kind_is_told_with_the_nearest(sage):
    for arguments in (["list"], ["info", "lru"]):
        result = sage("plugins", *arguments, "--kind", "evict")
        assert (result.code, "Did you mean 'eviction_policy'?" in result.err) == (2, True)


def test_a_broken_plugin_is_listed_with_its_error_and_the_rest_goes_on(sage, install):
    install("broken-plugin", BROKEN)
    result = sage("plugins", "list")
    assert result.code == 0
    assert "broken-plugin 1.5: broken-plugin does not import" in result.out
    assert "RuntimeError: no moon tonight" in result.out
    assert "sagellm-core-protocols" in result.out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise SystemExit(3)", "broken-plugin does not import (broken_plugin): SystemExit: 3"),
        (
            WORKING.replace("return [", "raise SystemExit(3); return ["),
            "sagellm_providers failed: SystemExit: 3",
        ),
        (WORKING.replace('"moon", f"', '"lru", f"'), "its own is 'broken-plugin:lru'"),
    ],
    ids=["import", "hook", "name of ours"],
)
def test_a_plugin_that_ends_the_process_or_takes_a_name_of_ours_stops_no_command(
    sage, install, source, message
):
    install("broken-plugin", source)
    listed = sage("plugins", "list")
    assert listed.code == 0
    assert "With an error, which stops only what uses them:\n  broken-plugin 1.5: " in listed.out
    assert message in listed.out
    assert message in sage("plugins", "info", "broken-plugin").out
    assert sage("config", "show").code == 0
    assert sage("plugins", "info", "sagellm-eviction-policy:lru").code == 0
    assert sage("doctor", "--json").json


def test_json_tells_each_plugins_error(sage, install):
    install("future-plugin", FUTURE)
    plugins = {
        entry["distribution"]: entry["error"] for entry in sage("plugins", "list", "--json").json["plugins"]
    }
    assert "was written for protocol version 99" in plugins["future-plugin"]
    assert plugins["sagellm-core-protocols"] is None


def test_a_denied_plugin_is_not_loaded(sage, install, monkeypatch):
    install("broken-plugin", BROKEN)
    monkeypatch.setenv("SAGELLM_PLUGINS_DENY", "broken-plugin")
    assert "broken-plugin" not in sage("plugins", "list").out


def test_info_tells_all_that_is_known(sage, install):
    install("moon-plugin", WORKING)
    assert sage("plugins", "info", "moon").out.splitlines() == [
        "eviction_policy moon: by the moon",
        "  distribution  moon-plugin 1.5",
        "  target        moon_plugin:Policy",
        f"  compatible    core >=0.2,<0.3 asked for, core {version(CORE)} installed; "
        "protocol version 0, core has 0",
        "  description   Evicts by the moon.",
    ]


def test_info_takes_a_qualified_name(sage, install):
    install("moon-plugin", WORKING)
    [entry] = sage("plugins", "info", "moon-plugin:moon", "--json").json["providers"]
    assert (entry["description"], entry["error"], entry["api"]) == ("Evicts by the moon.", None, 0)


def test_info_of_a_distribution_tells_about_all_it_provides(sage, install):
    install("moon-plugin", WORKING)
    entries = sage("plugins", "info", "moon-plugin", "--json").json["providers"]
    assert [entry["name"] for entry in entries] == ["mars", "moon"]


def test_info_tells_about_commands_alone_and_with_their_distribution(sage):
    first, *rest = sage("plugins", "info", "generate").out.splitlines()
    assert first.startswith("command generate: ")
    assert rest[0].split() == ["distribution", "sagellm-engines", __version__]
    found = sage("plugins", "info", "sagellm-engines", "--json").json
    assert {"generate", "chat"} <= {each["name"] for each in found["commands"]}
    assert found["providers"]


def test_info_of_a_target_that_does_not_import_shows_why(sage, install):
    install("moon-plugin", WORKING)
    result = sage("plugins", "info", "mars")
    assert result.code == 0
    assert "No module named 'absent_module'" in result.out


def test_info_of_a_broken_plugin_shows_its_error(sage, install):
    install("broken-plugin", BROKEN)
    result = sage("plugins", "info", "broken-plugin")
    assert (result.code, "no moon tonight" in result.out) == (0, True)
    assert sage("plugins", "info", "broken-plugin", "--json").json["plugins"][0]["version"] == "1.5"


def test_info_of_an_unknown_name_tells_the_nearest(sage, install):
    install("moon-plugin", WORKING)
    result = sage("plugins", "info", "mooon")
    assert result.code == 2
    assert result.err.startswith(
        "Error: no installed provider, command or distribution is called 'mooon'; installed: "
    )
    assert result.err.endswith("Did you mean 'moon'?\n")


def test_info_can_be_limited_to_a_kind(sage):
    assert (
        sage("plugins", "info", "null", "--kind", "engine", "--json").json["providers"][0]["kind"] == "engine"
    )
    assert "no installed engine or distribution" in sage("plugins", "info", "absent", "--kind", "engine").err


def test_check_shows_a_verdict_for_each_part_of_the_contract(sage):
    result = sage("plugins", "check", "sagellm-core-protocols", "--kind", "kv_allocator")
    assert result.code == 0
    rows = [line.split() for line in result.out.splitlines()]
    assert ["kv_allocator", "null", "isolation", "passed", "1,", "1", "skipped"] in rows
    assert result.out.endswith("sagellm-core-protocols: the checked provider keeps its contract.\n")
    assert result.err.splitlines() == ["loading sagellm-core-protocols", "kv_allocator null"]


def test_check_of_what_has_no_contract_fails(sage):
    result = sage("plugins", "check", "sagellm-core-protocols", "--kind", "model_family")
    assert result.code == 1
    assert "\nnot checked: model_family null: the kit has no contract for the kind model_family" in result.out
    assert result.out.endswith("sagellm-core-protocols: nothing could be checked.\n")


READER = """
from sagellm.core import InvalidInputError, Provider, TraceReaderProtocol, TraceRequest, hookimpl

class Moon(TraceReaderProtocol):
    def __init__(self, tokenize): pass
    def can_read(self, name, first_line): return first_line.startswith("moon")
    def read(self, lines):
        for number, line in enumerate(lines, 1):
            if not line.startswith("moon"):
                raise InvalidInputError(f"line {number} is no request")
            yield TraceRequest(0.0, 1, 1)

@hookimpl
def sagellm_providers():
    return [Provider("trace_reader", "moon", f"{__name__}:Moon", "")]
"""


def test_check_counts_what_it_called_and_fails_where_it_could_not(sage, install, tmp_path):
    install("moon-plugin", READER)
    arguments = ("plugins", "check", "moon-plugin")
    partly = sage(*arguments)
    assert partly.code == 1
    assert ["trace_reader", "moon", "methods", "called", "1", "of", "2"] in [
        line.split() for line in partly.out.splitlines()
    ]
    assert (
        "\nnot checked: trace_reader moon: read (needs a file of the format; give --sample FILE" in partly.out
    )
    assert partly.out.endswith("keeps its contract, as far as could be checked.\n")
    (tmp_path / "full").write_text("moon\n" * 3)
    wholly = sage(*arguments, "--sample", str(tmp_path / "full"), "--json")
    (provider,) = wholly.json["providers"]
    assert (wholly.code, provider["not_checked"]) == (0, [])
    assert (provider["num_called"], provider["num_methods"]) == (2, 2)
    assert provider["num_passed"] == len(provider["results"]) == 5


def test_a_sample_is_a_file_or_a_mapping(sage):
    result = sage("plugins", "check", "sagellm-engines", "--sample", "absent")
    assert (result.code, "must be a file that exists, or a mapping" in result.err) == (2, True)


def test_info_of_a_class_that_lacks_methods_names_them(sage, install):
    install("moon-plugin", READER.replace("def can_read", "def could_read"))
    assert "trace_reader 'moon' of moon-plugin 1.5 lacks can_read" in sage("plugins", "info", "moon").out


def test_check_of_a_provider_that_does_not_import_is_a_fault(sage, install):
    install("moon-plugin", WORKING)
    result = sage("plugins", "check", "moon-plugin", "--name", "mars", "--json")
    assert result.code == 1
    (provider,) = result.json["providers"]
    (checked,) = provider["results"]
    assert "No module named 'absent_module'" in checked["fault"]["found"]


def test_check_tells_a_fault_of_several_once(sage, install):
    install("moon-plugin", THIEVES)
    out = sage("plugins", "check", "moon-plugin").out
    rules = [line.partition(" (")[0] for line in out.splitlines() if "Rule: " in line]
    assert len(set(rules)) == len(rules) > 0
    for rule in rules:
        assert rule.startswith("kv_allocator mars and kv_allocator moon break their contracts. Rule: ")
    assert "  calls     free([-1]) (of kv_allocator mars)\n" in out
    assert out.endswith("moon-plugin: 2 of 2 checked providers break their contract.\n")


FORGETFUL = """
from sagellm.core import LifetimeMetrics, Provider, hookimpl
from sagellm.core.protocols.lifetime import NullLifetimePredictor

class Forgetful(NullLifetimePredictor):
    def update(self, *, sequence_id, actual_length, actual_time):
        raise KeyError(sequence_id)

@hookimpl
def sagellm_providers():
    return [Provider("lifetime_predictor", name, f"{__name__}:Forgetful", "") for name in ("moon", "mars")]
"""


def test_check_tells_one_cause_once_with_the_rules_that_it_breaks(sage, install):
    install("moon-plugin", FORGETFUL)
    out = sage("plugins", "check", "moon-plugin", "--name", "moon").out
    assert out.count("KeyError") == 1
    assert (
        "\nlifetime_predictor moon breaks its contract in 8 rules for one cause.\n  found     KeyError: "
        in out
    )
    assert (
        "\n  rules     predictions stay within their bounds\n            nothing remains at the limit\n"
        in out
    )
    of_both = sage("plugins", "check", "moon-plugin").out
    assert "lifetime_predictor mars and lifetime_predictor moon break their contracts in 8 rules" in of_both
    assert of_both.count("KeyError") == 1


def test_check_says_which_options_are_needed_and_takes_them(sage, install):
    install("moon-plugin", WITH_OPTIONS)
    arguments = ("plugins", "check", "moon-plugin")
    told = sage(*arguments)
    assert told.code == 1
    assert (
        "\nnot checked: eviction_policy mars and eviction_policy moon: needs options: phase; "
        "give them with --options '{NAME: VALUE}'"
    ) in told.out
    checked = sage(*arguments, "--name", "moon", "--options", "{phase: full}")
    assert (checked.code, "the checked provider keeps its contract" in checked.out) == (0, True)
    refused = sage(*arguments, "--options", "{phase: full}")
    assert "options go to one provider" in refused.err


@pytest.mark.parametrize("text", ["full", "[1]", "{a}", "{a: [}", "{"])
def test_options_to_check_with_are_a_mapping_of_plain_values(sage, text):
    result = sage("plugins", "check", "sagellm-core-protocols", "--options", text)
    assert (result.code, "it must be a mapping of plain values" in result.err) == (2, True)


def test_check_completes_the_names_of_distributions(install):
    from sagellm.testing.command import complete_distribution

    install("moon-plugin", BROKEN)
    assert complete_distribution("moon") == ["moon-plugin"]
    assert "sagellm-kv-pool" in complete_distribution("")


def test_info_lists_the_options_with_types_and_defaults(sage):
    shown = sage("plugins", "info", "qos").out
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "OPTION TYPE DEFAULT" in rows
    assert "weights Mapping[str, float], or null None" in rows
    assert "default_weight a number 1.0" in rows
    assert "within a text 'lru'" in rows
    assert "as in --eviction-policy 'qos{weights=…}'" in rows
    (found,) = sage("plugins", "info", "qos", "--json").json["providers"]
    assert found["options"][1] == {
        "name": "default_weight", "type": "a number", "is_required": False, "default": 1.0,
    }  # fmt: skip


def test_info_leaves_out_what_an_engine_gives_and_says_what_is_required(sage):
    assert "OPTION" not in sage("plugins", "info", "lru", "--kind", "eviction_policy").out
    shown = sage("plugins", "info", "file").out
    assert [word in shown for word in ("max_bytes", "required", "--kv-tiers 'file{max_bytes=…}'")] == [
        True
    ] * 3
    assert "runtime" not in shown


_FORMAT = """
from sagellm.core import Provider, hookimpl
from sagellm.core.protocols.checkpoint_format import NullCheckpointFormat

class Moon(NullCheckpointFormat):
    def __init__(self, phase="full", **_):
        pass

@hookimpl
def sagellm_providers():
    return [Provider("checkpoint_format", "moon", f"{__name__}:Moon", "")]
"""


def test_info_lists_no_options_that_nothing_can_set(sage, install):
    install("moon-format", _FORMAT)
    assert "OPTION" not in sage("plugins", "info", "moon").out
    assert sage("plugins", "info", "moon", "--json").json["providers"][0]["options"] == []
    assert sage("plugins", "info", "tiered", "--json").json["providers"][0]["options"] == []


def test_every_provider_that_is_installed_can_be_told_about(sage):
    for entry in PluginRegistry.load().providers():
        name = entry.qualified_name
        assert sage("plugins", "info", name, "--kind", entry.provider.kind).code == 0, name


def test_the_tab_key_completes_providers_distributions_and_kinds(install):
    assert complete_plugin("qo") == ["qos"]
    assert "sagellm-kv-pool" in complete_plugin("sagellm-")
    assert complete_kind("kv_t") == ["kv_tier"]
    assert complete_providers("eviction_policy")("lru,s3") == ["lru,s3fifo"]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("order=sho", ["order=shortest"]),
        ("order=shortest{st", ["order=shortest{starvation_s="]),
        ("mlfq,order=shortest{starvation_s=3, max", ["mlfq,order=shortest{starvation_s=3, max_probes="]),
        ("shortest{starvation_s=3},ml", ["shortest{starvation_s=3},mlfq"]),
        ("there-is-none{st", []),
    ],
)
def test_the_names_of_options_can_be_completed(typed: str, completed: list[str]) -> None:
    assert complete_providers("scheduler_pass")(typed) == completed
