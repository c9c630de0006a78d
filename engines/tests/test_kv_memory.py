"""Memory for KV is zero, and is taken when it is used."""

from __future__ import annotations

import psutil
import pytest
import torch

from sagellm.engines.forward.device_memory import zeroed

CPU = torch.device("cpu")


def rss_mib():
    return psutil.Process().memory_info().rss / 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_zero_and_can_be_written(dtype):
    memory = zeroed(3_000_000, dtype, CPU)
    assert (memory.dtype, memory.shape) == (dtype, (3_000_000,))
    assert not memory.any()
    memory[-1] = 1.0
    assert memory.count_nonzero() == 1


def test_nothing_is_nothing():
    assert zeroed(0, torch.float32, CPU).numel() == 0


def test_what_is_not_touched_takes_no_memory():
    before = rss_mib()
    memory = zeroed(256 << 20, torch.float32, CPU)
    assert rss_mib() - before < 64
    memory[: 32 << 20] = 1.0
    grown = rss_mib() - before
    assert 100 < grown < 300


def test_it_goes_back_with_the_tensor():
    before = rss_mib()
    memory = zeroed(64 << 20, torch.float32, CPU)
    view = memory.fill_(1.0).as_strided((4, 4), (8, 1))
    del memory
    assert rss_mib() - before > 200
    del view
    assert rss_mib() - before < 64
