"""The part of a contract that a test of the kit covers, as its name says."""

from __future__ import annotations

import re

CONTRACT = "contract"

_PATTERNS = {
    "random operations": r"random",
    "threads": r"thread",
    "isolation": r"share_nothing|never_share|without_each_other",
    "cost": r"cost|cheap|takes_|does_not_grow",
    "integrity": r"integrity|let_go",
}

ASPECTS = ("isolation", CONTRACT, "integrity", "random operations", "threads", "cost")
"""All parts, in test order: if instances share state, that shows first."""


def aspect_of(test_name: str) -> str:
    """Return the part that a test covers, `contract` if its name has no other."""
    return next((aspect for aspect, pattern in _PATTERNS.items() if re.search(pattern, test_name)), CONTRACT)


def rule_of(test_name: str) -> str:
    """Return the fact that a test states: `test_no_block_is_freed_twice` is `no block is freed twice`."""
    return test_name.removeprefix("test_").replace("_", " ")
