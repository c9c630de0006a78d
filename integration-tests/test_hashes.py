"""A hash alone decides nothing, and one that leaves the process is the same in every process."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from suite import ROOT, load_tests

from sagellm.core import Randomness, VirtualClock
from sagellm.core.kv_block import BlockHeader, BlockKey
from sagellm.kvmgr.kv_pool.tiers.backend_tier import BackendTier
from sagellm.kvmgr.kv_pool.tiers.backends import DDRBackend
from sagellm.kvmgr.kv_pool.tiers.storage import TieredKVStorage
from sagellm.testing.kv_tier import get, make_data, make_header, put
from sagellm.testing.kv_tier_model import KVTierMachine

IN_MEMORY_ONLY = {
    "core-protocols/testing/src/sagellm/testing/scheduler_pass.py",  # compares two in one process
    "core-protocols/src/sagellm/core/tokens.py",  # TokenIds.__hash__
    "engines/lab/src/sagellm/lab/simulation/contents.py",  # numbers contents within one replay
    "prefix-cache/src/sagellm/kvmgr/prefix_cache/node.py",  # keys of ghosts
    "prefix-cache/src/sagellm/kvmgr/prefix_cache/radix.py",
    "prefix-cache/src/sagellm/kvmgr/prefix_cache/ghosts.py",
    "prefix-cache/src/sagellm/kvmgr/prefix_cache/tree.py",
}
"""Where Python's own hash is used, which differs from process to process."""

KEYS_OF_A_PROCESS = """
import json
from sagellm.core import Namespace, VirtualClock, pack
from sagellm.core.kv_block import KVIdentity, headers_of
from sagellm.server.http.access_control import tenant_of
from sagellm.kvmgr.prefix_cache import RadixPrefixCache

identity = KVIdentity("model", "layout", "float32")
namespaces = [Namespace("a"), Namespace("b", "salt"), Namespace("b", adapter="x"), Namespace.public("docs")]
events = []
cache = RadixPrefixCache(100, 4, clock=VirtualClock(), identity=identity)
cache.subscribe(events.append)
keys = []
for number, namespace in enumerate(namespaces):
    tokens = [number, *range(30)]
    cache.insert_prefix(tokens, list(range(8 * number, 8 * number + 8)), namespace)
    keys += [header.key.hash.hex() for header in headers_of(pack(tokens), 4, namespace, identity)]
cache.evict(5)
hashes = [[block_hash.hex() for block_hash in event.block_hashes] for event in events]
print(json.dumps({"events": hashes, "keys": keys, "tenant": tenant_of(b"key"), "random": hash("a")}))
"""

ANSWER_OVER_A_FILE = """
import json, sys
from sagellm.engines import LLMEngine, SamplingParams

model, folder = sys.argv[1:]
tiers = {"file": {"max_bytes": "8MiB", "folder": folder, "name": "shared"}}
engine = LLMEngine(model=model, dtype="float32", device="cpu", num_blocks=32, block_size=16, kv_tiers=tiers,
                   kv_fetch="always")
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
(output,) = engine.generate([list(range(5, 261))], params)
engine.client.core.kv.evict(32)
engine.close()
print(json.dumps([output.outputs[0].token_ids, output.num_cached_tokens]))
"""


class CutKeys:
    """Counts what falls on one key when keys have fewer bits than they should."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
        self.headers_of: dict[BlockKey, set[bytes]] = defaultdict(set)

        def key(header: BlockHeader) -> BlockKey:
            made = BlockKey(header.group, header.hash[:num_bytes] + bytes(16 - num_bytes))
            self.headers_of[made].add(header.encode())
            return made

        monkeypatch.setattr(BlockHeader, "key", property(key))

    @property
    def num_collisions(self) -> int:
        return sum(len(headers) - 1 for headers in self.headers_of.values())


def run_python(program: str, *arguments: str, seed: int) -> object:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_keys_of_16_bits_cost_blocks_and_never_give_a_wrong_one(monkeypatch):
    cut = CutKeys(monkeypatch, num_bytes=2)
    tier = BackendTier(DDRBackend(1 << 22))
    for number in range(2_000):
        put(tier, make_header(number), make_data(number))
    for number in range(2_000):
        outcome, data = get(tier, make_header(number))
        assert outcome != "done" or data == make_data(number), f"block {number} came back with other bytes"
    assert cut.num_collisions > 10
    tier.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_keys_of_8_bits_give_no_wrong_bytes_in_any_order_of_operations(monkeypatch, seed):
    cut = CutKeys(monkeypatch, num_bytes=1)
    tiers = {name: BackendTier(DDRBackend(10 * 4096)) for name in ("host", "file")}
    tiered = TieredKVStorage(tiers, clock=VirtualClock())
    machine = KVTierMachine(tiered, Randomness(seed).stream("operations"))
    machine.run(2_000, check_every=1)
    assert machine.num_hits > 100
    assert cut.num_collisions > 3


@pytest.mark.parametrize("seed", range(2))
def test_keys_of_8_bits_change_no_token(monkeypatch, tmp_path, seed):
    cut = CutKeys(monkeypatch, num_bytes=1)
    simulation = load_tests("engines/tests/test_tier_simulation.py").Simulation(
        seed, tmp_path, **{"kv.fetch": "always"}
    )
    simulation.run(600)  # every token is compared
    assert simulation.num_finished > 30
    assert simulation.offload.metrics().num_fetched_blocks > 10
    assert cut.num_collisions > 50


def test_what_leaves_the_process_is_the_same_in_two_with_other_hash_seeds():
    one, other = (run_python(KEYS_OF_A_PROCESS, seed=seed) for seed in (1, 2))
    assert one.pop("random") != other.pop("random")
    assert len(one["keys"]) == len(set(one["keys"])) == 28
    assert {key for event in one["events"] for key in event}
    assert one == other


@pytest.mark.full
def test_kv_in_a_file_is_found_by_a_process_with_another_hash_seed(tmp_path):
    from sagellm.engines.testing import make_checkpoint

    model = str(make_checkpoint(tmp_path / "model", family="qwen3", seed=7))
    folder = str(tmp_path / "kv")
    Path(folder).mkdir()
    first, num_cached = run_python(ANSWER_OVER_A_FILE, model, folder, seed=1)
    second, num_found = run_python(ANSWER_OVER_A_FILE, model, folder, seed=2)
    assert (first, num_cached, num_found) == (second, 0, 240)


def test_pythons_own_hash_stays_in_memory():
    found = set()
    for path in (*ROOT.glob("*/src/sagellm/**/*.py"), *ROOT.glob("*/*/src/sagellm/**/*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if any(isinstance(call.func, ast.Name) and call.func.id == "hash" for call in calls):
            found.add(str(path.relative_to(ROOT)))
    assert found == IN_MEMORY_ONLY, "hash() of a text is another one in every process"
