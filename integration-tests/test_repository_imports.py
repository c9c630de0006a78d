"""Importing and listing are cheap: nothing heavy is loaded before it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "pydantic", "rich"]
LIGHT_MODULES = [
    "sagellm.core",
    "sagellm.kvmgr.prefix_cache",
    "sagellm.kvmgr.kv_pool",
    "sagellm.kvmgr.eviction",
    "sagellm.kvmgr.scheduler_ir",
    "sagellm.kvmgr.lifetime",
    "sagellm.accel",
    "sagellm.comm",
    "sagellm.engines",
    "sagellm.server",
    "sagellm.adapters",
    "sagellm.lab",
]
TENSOR_FREE_MODULES = [
    "sagellm.core",
    "sagellm.kvmgr.prefix_cache",
    "sagellm.kvmgr.eviction",
    "sagellm.kvmgr.scheduler_ir",
    "sagellm.adapters",
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def loaded_after(code: str, watched: list[str]) -> set[str]:
    done = run(sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)")
    return set(done.stdout.split()) & set(watched)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_a_package_loads_nothing_heavy(module):
    assert not loaded_after(f"import {module}", HEAVY)


@pytest.mark.parametrize("module", TENSOR_FREE_MODULES)
def test_bookkeeping_needs_no_torch_even_when_it_is_used(module):
    code = f"import {module} as m\nfor name in m.__all__: getattr(m, name)"
    assert not loaded_after(code, ["torch", "transformers"])


@pytest.mark.parametrize("program", ["sage", "sagellm"])
def test_the_installed_programs_run(program):
    assert run(str(Path(sys.executable).with_name(program)), "--version").stdout.startswith("sageLLM ")
