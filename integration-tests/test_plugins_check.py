"""`plugins check` names what is wrong with modules from outside, and clears what is right."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from scratch import Scratch

ROOT = Path(__file__).resolve().parents[1]
BROKEN = Path(__file__).with_name("broken-plugins")
FAULTS = {
    "trusting": ("no block is freed twice", "BlockError", "no error", "free([62]); free([62])"),
    "generous": (
        "one block more than there are is refused",
        "OutOfBlocksError",
        "no error",
        "allocate(65) → ",
    ),
    "runs": (
        "no random sequence of calls disagrees with a model",
        "",
        "one block was handed out twice in ",
        "; free([",
    ),
    "common": (
        "two allocators share nothing",
        "other.num_free_blocks == total",
        "0 == 64",
        "allocate(64) → ",
    ),
    "lowest": (
        "the cost of a call does not grow with the number of blocks",
        "",
        "32 blocks take ",
        "",
    ),
    "greedy": ("a pinned sequence is never chosen", "", "pinned sequences were chosen", "select_victims("),
    "careless": (
        "no random sequence of calls disagrees with a model",
        "",
        "node 1 was named: it is locked or has a child",
        "on_insert(node 1); add_candidate(node 1); remove_candidate(node 1); victim() → node 1",
    ),
    "scan": ("a decision is cheap among many leaves", "", "one victim of 10,000 leaves took ", ""),
    "gossip": ("two policies decide without each other", "", " instead of node ", ""),
    "hoarder": ("nodes that left are let go", "", "5000 of 5,000 nodes that left are still held", ""),
    "open": (
        "a block of another tenant salt or adapter is a miss",
        "get(tier, other)[0] == 'missing'",
        "'done' == 'missing'",
        "",
    ),
    "stale": ("what comes back was put last", "", "the bytes of an earlier put came back", ""),
    "late": ("nothing is written to a buffer after the result", "buffer == mine", "<memory at ", ""),
    "lossy": ("no block is lost while there is room", "", "of 48 blocks that were put, ", ""),
    "endless": (
        "no more is stored than max bytes",
        "",
        "403200 bytes came back, and 131072 were allowed",
        "",
    ),
}
"""Of each provider: the rule it breaks, what was expected (where the rule does not say it), found, called."""

PROVIDERS = {
    "acme-blocks": ["trusting", "generous", "runs", "common", "lowest"],
    "acme-evict": ["greedy", "careless", "scan", "gossip", "hoarder"],
    "acme-tiers": ["open", "stale", "late", "lossy", "endless"],
}
DISTRIBUTION = {name: distribution for distribution, names in PROVIDERS.items() for name in names}

HATCHLING = """
[build-system]
requires = ["hatchling>=1.24"]
build-backend = "hatchling.build"
"""
CHECK = "from sagellm.engines.cli import main; main()"


class Checks:
    """An environment with the packages from outside, and what the command says of each."""

    def __init__(self, folder: Path) -> None:
        self.scratch = Scratch(folder)
        for package in (
            BROKEN / "allocator",
            BROKEN / "policy",
            BROKEN / "tier",
            ROOT / "examples" / "third-party-policy",
        ):
            self.scratch.install(package)

    @cache  # noqa: B019  (one object, as long as this module)
    def json(self, distribution: str) -> tuple[int, dict[str, Any]]:
        """Return exit status and providers by name."""
        arguments = ("llm", "plugins", "check", distribution, "--json")
        done = self.scratch.run("-c", CHECK, *arguments, check=False)
        found = json.loads(done.stdout)["providers"]
        return done.returncode, {f"{each['kind']} {each['name']}": each for each in found}

    def results(self, name: str) -> list[dict[str, Any]]:
        """Return what the kit says of one of the providers with faults."""
        _, providers = self.json(DISTRIBUTION[name])
        (provider,) = (each for each in providers.values() if each["name"] == name)
        return list(provider["results"])

    def text(self, *arguments: str) -> tuple[int, str]:
        """Return exit status and output."""
        done = self.scratch.run("-c", CHECK, "llm", "plugins", "check", *arguments, check=False)
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Checks:
    return Checks(tmp_path_factory.mktemp("checks") / "environment")


# They take ten seconds each; test_conformance_mutants.py breaks their kinds in the process of the tests.
@pytest.mark.full
@pytest.mark.parametrize("distribution", PROVIDERS)
def test_a_distribution_that_ignores_the_contract_in_five_ways_fails(
    checks: Checks, distribution: str
) -> None:
    status, providers = checks.json(distribution)
    assert status == 1
    assert len(providers) == 5
    for provider in providers.values():
        assert any(result["outcome"] == "failed" for result in provider["results"])


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(checks: Checks, name: str) -> None:
    rule, expected, found, calls = FAULTS[name]
    faults = {each["fault"]["rule"]: each["fault"] for each in checks.results(name) if each["fault"]}
    assert rule in faults
    assert faults[rule]["expected"] == expected
    assert found in faults[rule]["found"]
    assert calls in "; ".join(faults[rule]["calls"])


BROKEN_ASPECTS = {
    "lowest": {"cost"},
    "greedy": {"contract"},
    "scan": {"cost"},
    "hoarder": {"integrity"},
    "gossip": {"isolation", "threads"},
    "open": {"contract"},
    "stale": {"contract"},
    "late": {"contract", "random operations", "threads"},
    "lossy": {"contract"},
    "endless": {"contract"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN_ASPECTS)
def test_what_a_fault_does_not_touch_passes(checks: Checks, name: str) -> None:
    failed = {each["aspect"] for each in checks.results(name) if each["outcome"] == "failed"}
    assert failed <= BROKEN_ASPECTS[name]
    assert failed


def test_a_policy_from_outside_that_keeps_the_contract_passes(checks: Checks) -> None:
    status, output = checks.text("acme-mru-policy")
    assert status == 0, output
    assert output.endswith("acme-mru-policy: the checked provider keeps its contract.\n")


@pytest.mark.full
def test_what_the_page_on_plugins_shows_keeps_its_contracts(checks: Checks, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    policy, allocator, plugin, *_ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    project, *_ = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    package = tmp_path / "my-policy"
    (package / "my_policy").mkdir(parents=True)
    (package / "pyproject.toml").write_text(project + HATCHLING)
    for name, code in (("policy", policy), ("allocator", allocator), ("plugin", plugin), ("__init__", "")):
        (package / "my_policy" / f"{name}.py").write_text(code)
    checks.scratch.install(package)
    status, output = checks.text("my-policy")
    assert status == 0, output
    assert output.endswith("my-policy: all 2 checked providers keep their contract.\n")


def test_the_table_and_the_faults_can_be_read(checks: Checks) -> None:
    status, output = checks.text("acme-blocks", "--name", "trusting")
    assert status == 1
    rows = [line.split() for line in output.splitlines()]
    assert rows[0] == ["KIND", "NAME", "CHECK", "VERDICT"]
    assert ["kv_allocator", "trusting", "contract", "FAILED"] in [row[:4] for row in rows]
    assert ["kv_allocator", "trusting", "cost", "passed", "2"] in rows
    fault = "\n".join(
        [
            "kv_allocator trusting breaks its contract. Rule: no block is freed twice "
            "(Neither two calls nor one call can free a block twice)",
            "  expected  BlockError",
            "  found     no error",
            "  calls     allocate(3) → [63, 62, 61]; free([62]); free([62])",
        ]
    )
    assert fault in output


HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]["default"]


WITHOUT_CONTRACT = (
    *("attention_backend", "checkpoint_format", "engine", "executor", "forward_backend"),
    "model_family",
)
UNCHECKED = {
    "accel": ["forward_backend cuda", "forward_backend native"],
    "core-protocols": sorted(f"{kind} null" for kind in (*WITHOUT_CONTRACT, "kv_offload", "kv_saves")),
    "eviction-policy": ["eviction_policy belady"],
    "kv-pool": ["kv_offload tiered", "kv_saves file", "kv_tier redis"],
}
"""Kinds without a contract, and what needs to know the future, a server, or tiers; all of these are named."""

MEMBERS = [each if isinstance(each, str) else each["path"] for each in HATCH["workspace"]["members"]]
UNCHECKED_KINDS = {"engines": WITHOUT_CONTRACT, "engines/lab": {"trace_reader"}}
"""Those of which nothing is checked; trace readers need a file."""
WITHOUT_PROVIDERS = {"core-protocols/testing", "engines/server"}


@pytest.mark.full
@pytest.mark.parametrize("package", [each for each in MEMBERS if each not in WITHOUT_PROVIDERS])
def test_our_own_packages_pass(checks: Checks, package: str) -> None:
    status, providers = checks.json(f"sagellm-{package.rpartition('/')[2]}")
    assert not any(result["fault"] for each in providers.values() for result in each["results"])
    unchecked = [name for name, each in providers.items() if each["unchecked"] or each["not_checked"]]
    if package in UNCHECKED_KINDS:
        assert {name.split()[0] for name in unchecked} == set(UNCHECKED_KINDS[package])
    else:
        assert sorted(unchecked) == UNCHECKED.get(package, [])
    assert status == int(bool(unchecked))
