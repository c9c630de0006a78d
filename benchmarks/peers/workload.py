"""The prompts that every subject of `kv_micro.py` sees; needs the standard library alone."""

from __future__ import annotations

import random

BLOCK_SIZE = 16
LENGTHS = (512, 2_048, 8_192, 32_768)
NUM_BLOCKS = 131_072
NUM_NODES = 8  # on the resident path of each length
VOCAB_SIZE = 150_000


def tokens(count: int, seed: str) -> list[int]:
    """Return random token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def others() -> list[list[int]]:
    """Return 500 prompts of 1,024 tokens: 64 families that share their first 512."""
    families = [tokens(512, f"family {index}") for index in range(64)]
    return [families[index % 64] + tokens(512, f"other {index}") for index in range(500)]


def path(length: int) -> list[int]:
    """Return the resident path's own tokens."""
    return tokens(length, f"resident {length}")


def resident(length: int) -> list[list[int]]:
    """Return prompts that, cached in order, leave the first one on a path of `NUM_NODES` nodes.

    The others leave it at eighths of its length, so that a tree has to split it there.
    """
    whole = path(length)
    cuts = [length * part // NUM_NODES for part in range(1, NUM_NODES)]
    return [whole, *(whole[:cut] + tokens(BLOCK_SIZE, f"branch {length} {cut}") for cut in cuts)]


def hit(length: int) -> list[int]:
    """Return a prompt that goes on where the resident path ends."""
    return path(length) + tokens(BLOCK_SIZE, f"end {length}")


def misses(length: int) -> list[list[int]]:
    """Return prompts of which nothing is cached."""
    return [tokens(length, f"miss {length} {index}") for index in range(8)]


def fresh(length: int, index: int) -> list[int]:
    """Return a prompt that differs from every other one from its first token on; cheap."""
    return [VOCAB_SIZE + index, *range(1, length)]
