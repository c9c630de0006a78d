"""`hatch run seeds` finds nothing in the product, and what it should in one with a bug."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from suite import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import seeds

from sagellm.kvmgr.kv_pool import PagedKVPool
from sagellm.kvmgr.kv_pool.free_list import FreeListAllocator
from sagellm.kvmgr.prefix_cache.tree import RadixTree

SCRIPT = ROOT / "benchmarks" / "seeds.py"


@pytest.mark.full  # 20 s of CPU
def test_random_operations_from_some_seeds_find_nothing():
    command = [sys.executable, str(SCRIPT), "--seeds", "42", "--first", "10000", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["machine"], row["seeds"], row["violations"]) for row in found["machines"]] == [
        (name, 6, 0) for name in seeds.MACHINES
    ]


@pytest.mark.parametrize(
    ("name", "owner", "method", "broken"),
    [
        ("allocator", FreeListAllocator, "claim", lambda self, block_ids: None),
        ("pool", PagedKVPool, "share", lambda self, block_ids: None),
        ("radix tree", RadixTree, "evict", lambda self, *_, **__: []),
    ],
)
def test_a_bug_is_found_and_its_seed_reported(monkeypatch, name, owner, method, broken):
    _, _, violation = seeds.run_seed((name, 4))
    assert violation is None
    monkeypatch.setattr(owner, method, broken)
    _, _, violation = seeds.run_seed((name, 4))
    assert (violation.machine, violation.seed) == (name, 4)
    assert "Traceback" in violation.error
