"""What any peer of a core may say and hear: who it is, and calls of its operations. Imports no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from sagellm.core import RequestLimits
from sagellm.engines.sampling.params import SamplingParams


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """To the core: run an operation between two steps and answer with a Reply of the same number."""

    number: int
    operation: str
    arguments: dict[str, Any]


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """From the core, first of all: what it runs. Its model is loaded."""

    config: dict[str, Any]  # dotted keys, with what was chosen for "auto"
    limits: RequestLimits
    default_params: SamplingParams
    pid: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """From the core, instead of Hello: why it cannot start."""

    message: str


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    """From the core: the answer to a Call, or why there is none."""

    number: int
    result: Any = None
    error: str | None = None
