"""Memory that is used again, and that for weights, allocated on a thread while modules are imported."""

import contextvars
import ctypes
import mmap
import threading

import numpy as np
import pytest
import torch

from sagellm.accel.native import memory
from sagellm.accel.native.memory import ReusedMemory, WeightMemory, pages_for_weights, weight_memory

MEBIBYTE = 1 << 20


def resident_bytes(pages):
    libc = ctypes.CDLL(None, use_errno=True)
    present = (ctypes.c_ubyte * (pages.nbytes // mmap.PAGESIZE))()
    address = ctypes.c_void_p(pages.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(pages.nbytes), present) == 0
    return sum(each & 1 for each in present) * mmap.PAGESIZE


def threads_of_it():
    return [each for each in threading.enumerate() if each.name == "sagellm-weight-memory"]


def test_what_the_model_takes_has_been_allocated_and_is_zero():
    ahead = WeightMemory(64 * MEBIBYTE)
    ahead._thread.join()
    pages = ahead.take(64 * MEBIBYTE)
    assert resident_bytes(pages) == pages.nbytes == 64 * MEBIBYTE
    assert not pages.any()
    pages[:] = 1  # it can be written


def test_a_model_larger_than_its_files_finds_room():
    ahead = WeightMemory(64 * MEBIBYTE)
    assert ahead.take(70 * MEBIBYTE).nbytes == 70 * MEBIBYTE


def test_what_a_smaller_model_leaves_over_is_freed():
    ahead = WeightMemory(64 * MEBIBYTE)
    ahead._thread.join()
    whole = ahead._memory
    assert ahead.take(10 * MEBIBYTE - 1).nbytes == 10 * MEBIBYTE - 1
    assert resident_bytes(whole[: 64 * MEBIBYTE]) <= 12 * MEBIBYTE  # a huge page may straddle the end


def test_it_is_taken_once_and_never_too_small():
    ahead = WeightMemory(MEBIBYTE)
    assert ahead.take(2 * MEBIBYTE) is None
    assert ahead.take(MEBIBYTE) is None


def test_taking_it_ends_the_thread_before_anything_is_written():
    ahead = WeightMemory(512 * MEBIBYTE)
    pages = ahead.take(512 * MEBIBYTE)
    assert not threads_of_it()
    pages[:: mmap.PAGESIZE] = 5
    assert int(pages[:: mmap.PAGESIZE].min()) == 5


def test_the_first_model_in_the_block_gets_it():
    with weight_memory(8 * MEBIBYTE):
        first, second = pages_for_weights(8 * MEBIBYTE), pages_for_weights(8 * MEBIBYTE)
    assert first.base is not None
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(first, pages_for_weights(8 * MEBIBYTE))


def test_nothing_is_left_of_it_behind_the_block():
    with pytest.raises(KeyError), weight_memory(64 * MEBIBYTE):
        raise KeyError
    assert not threads_of_it()
    assert memory._weight_memory.get() is None


def test_a_block_in_another_context_has_its_own():
    with weight_memory(8 * MEBIBYTE):
        ahead = memory._weight_memory.get()
        assert contextvars.Context().run(memory._weight_memory.get) is None
        pages_for_weights(8 * MEBIBYTE)
        assert ahead.take(1) is None


def test_a_kernel_that_refuses_leaves_the_block_without(monkeypatch):
    def refuse(num_bytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory, "WeightMemory", refuse)
    with weight_memory(MEBIBYTE):
        assert pages_for_weights(MEBIBYTE).nbytes == MEBIBYTE


def test_memory_is_reused_once_nobody_holds_it_or_a_view_of_it():
    reused = ReusedMemory()

    def take(num_rows):
        return torch.from_numpy(reused.take(40 * num_rows).view(np.float32).reshape(num_rows, 10))

    first = take(10)
    second = take(10)
    assert first.data_ptr() != second.data_ptr()
    address, row = second.data_ptr(), second[3:4]
    del second
    third = take(10)
    assert third.data_ptr() != address == row.data_ptr() - 3 * 40
    address = third.data_ptr()
    del third
    assert take(4).data_ptr() == address
    assert take(10).data_ptr() == address
    assert take(11).shape == (11, 10)
