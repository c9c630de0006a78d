"""Packed token ids behave as a sequence of ints and refuse what is none."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sagellm.core import InvalidInputError, TokenIds, pack
from sagellm.core.tokens import EMPTY

ids_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


class ArrayLike:
    """What numpy and torch arrays have in common."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def tolist(self) -> list[Any]:
        return self.values


@settings(deadline=None, derandomize=True)
@given(ids_lists)
def test_packing_keeps_every_id(ids: list[int]) -> None:
    tokens = pack(ids)
    assert (tokens.tolist(), list(tokens), len(tokens), len(tokens.data)) == (
        ids,
        ids,
        len(ids),
        4 * len(ids),
    )
    assert tokens == ids
    assert tokens == tuple(ids)
    assert pack(tokens) is tokens


@settings(deadline=None, derandomize=True)
@given(ids_lists, st.slices(40))
def test_a_slice_is_the_slice_of_the_list(ids: list[int], part: slice) -> None:
    sliced = pack(ids)[part]
    assert isinstance(sliced, TokenIds)
    assert sliced.tolist() == ids[part]


@settings(deadline=None, derandomize=True)
@given(ids_lists, ids_lists)
def test_equal_tokens_are_equal_keys_and_sums_are_concatenations(one: list[int], other: list[int]) -> None:
    assert (pack(one) == pack(other)) == (one == other)
    assert hash(pack(one)) == hash(pack(list(one)))
    assert (pack(one) + other).tolist() == one + other


@pytest.mark.parametrize(
    "source", [(1, 2), range(1, 3), array("i", [1, 2]), array("q", [1, 2]), ArrayLike([1, 2])]
)
def test_any_sequence_or_array_of_ints_is_packed(source: Any) -> None:
    assert pack(source).tolist() == [1, 2]


def test_single_ids_are_plain_ints() -> None:
    tokens = pack([7, 8, 9])
    assert (tokens[0], tokens[-1], 8 in tokens, tokens.index(9)) == (7, 9, True, 2)
    with pytest.raises(IndexError):
        tokens[3]


@pytest.mark.parametrize("source", ["12", b"12", bytearray(4), {1: 2}])
def test_text_bytes_and_mappings_are_refused(source: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"not {type(source).__name__}"):
        pack(source)


@pytest.mark.parametrize("ids", [[1.0], ["1"], [None], [2**31], [2**40], [-(2**40)], ArrayLike([[1], [2]])])
def test_what_is_no_int32_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be ints in 0 … 2147483647"):
        pack(ids)


@pytest.mark.parametrize("ids", [[-1], [5, -7, 2], [-(2**31)]])
def test_negative_ids_are_refused_and_the_smallest_is_named(ids: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=f"the smallest is {min(ids)}"):
        pack(ids)


def test_packed_bytes_must_be_whole_ids() -> None:
    with pytest.raises(InvalidInputError, match=r"takes the bytes of int32 numbers, not list; pack\(ids\)"):
        TokenIds([1, 2, 3, 4])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="multiple of 4 bytes, not 6"):
        TokenIds(b"123456")


def test_a_long_prompt_is_shown_cut_off() -> None:
    assert repr(pack(range(20))) == "TokenIds([0, 1, 2, 3, 4, 5, 6, 7, …], 20 tokens)"
    assert repr(EMPTY) == "TokenIds([], 0 tokens)"


def test_tokens_equal_no_other_type() -> None:
    assert pack([1]) != "1"
    assert pack([1]) != 1
