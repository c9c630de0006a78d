"""The number of threads before torch is imported, and after."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_BEFORE_AND_AFTER = """
import sys
from sagellm.accel.threads import num_threads, set_num_threads

before = num_threads()
set_num_threads(1)
lowered = num_threads()
set_num_threads(before)
assert "torch" not in sys.modules
import torch

after = num_threads()
set_num_threads(1)
print(before, lowered, after, torch.get_num_threads())
"""


def numbers(**variables: str) -> list[int]:
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE_AND_AFTER],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(each) for each in done.stdout.split()]


@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "3,2"}, {"MKL_NUM_THREADS": "2"}])
def test_without_torch_the_number_is_the_one_that_torch_begins_with(variables):
    before, lowered, after, torchs = numbers(**variables)
    assert before == after
    assert lowered == torchs == 1
