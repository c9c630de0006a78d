"""An outside package with one eviction policy is installed into a scratch environment and used by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scratch import Scratch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "third-party-policy"

FIND = """
from sagellm.core import PluginRegistry

registry = PluginRegistry.load()
registry.require_healthy()
print(registry.find("eviction_policy", "mru").qualified_name)
print(registry.resolve("eviction_policy", "mru").__module__)
"""

GENERATE = """
import sys

from acme_mru.policy import MRUEvictionPolicy
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

made = []
initialise = MRUEvictionPolicy.__init__


def record(self):
    made.append(self)
    initialise(self)


MRUEvictionPolicy.__init__ = record
make_checkpoint(sys.argv[1], family="qwen3", seed=0)
prompts = [[1 + (7 * number + position) % 50 for position in range(40)] for number in range(12)]


def generate(policy):
    engine = LLMEngine(
        model=sys.argv[1], dtype="float32", device="cpu", block_size=8, num_blocks=24, max_num_seqs=2,
        enable_prefix_caching=True, eviction_policy=policy,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]


expected = generate("lru")
assert made == []
assert generate("mru") == expected
assert [type(policy) for policy in made] == [MRUEvictionPolicy]
metrics = made[0].metrics()
assert metrics.num_inserted > 0, metrics
assert metrics.num_victims > 0, metrics
print("evicted", metrics.num_victims)
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    return Scratch(tmp_path_factory.mktemp("without") / "environment")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """The outside package is copied, built and installed, without network and without dependencies."""
    made = Scratch(tmp_path_factory.mktemp("scratch") / "environment")
    made.install(EXAMPLE)
    return made


def test_before_it_is_installed_its_name_is_unknown(without: Scratch) -> None:
    done = without.run("-c", FIND, check=False)
    assert done.returncode != 0
    assert "no installed eviction_policy is called 'mru'; installed: " in done.stderr


def test_once_installed_it_is_found_by_its_name(scratch: Scratch) -> None:
    assert scratch.run("-c", FIND).stdout.split() == ["acme-mru-policy:mru", "acme_mru.policy"]


def test_this_environment_does_not_see_it(scratch: Scratch) -> None:
    done = subprocess.run([sys.executable, "-c", "import acme_mru"], capture_output=True, check=False)
    assert done.returncode != 0


def test_it_passes_its_own_tests_where_it_is_installed(scratch: Scratch, tmp_path: Path) -> None:
    tests = shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    scratch.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tests)


def test_one_configuration_name_makes_the_engine_use_it(scratch: Scratch, tmp_path: Path) -> None:
    done = scratch.run("-c", GENERATE, tmp_path / "checkpoint")
    assert done.stdout.splitlines()[-1].startswith("evicted ")


def test_the_policy_stays_a_page_long() -> None:
    lines = (EXAMPLE / "src" / "acme_mru" / "policy.py").read_text().splitlines()
    assert len(lines) < 60
