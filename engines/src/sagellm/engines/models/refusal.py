"""Turns errors of transformers' modelling code into the reason why a checkpoint cannot be run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sagellm.core import SageLLMError, UnsupportedModelError

_MAX_REASON = 300  # characters; some errors of torch have pages


@contextmanager
def refuse_on_error(what: str) -> Iterator[None]:
    """Turn any exception inside the block into an UnsupportedModelError that begins with `what`.

    Our own errors pass, and so do memory errors, which are not the model's fault.
    """
    try:
        yield
    except (SageLLMError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise UnsupportedModelError(f"{what}: {reason[:_MAX_REASON]} ({type(error).__name__})") from error
