"""Identifier types. They are plain ints and strings at run time."""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a KV block in its pool, 0 … total_blocks - 1."""

NodeId = NewType("NodeId", int)
"""A node of one prefix cache; never used twice."""

RequestId = NewType("RequestId", str)
"""What a caller asked for: one prompt with its parameters."""

SequenceId = NewType("SequenceId", str)
"""One generated continuation of a request; a request with n = 1 has one, of the same id."""
