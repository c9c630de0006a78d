"""Settings of all integration tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sagellm.engines import LLMEngine
from sagellm.engines.testing import make_checkpoint

torch.set_num_threads(1)  # the models are so small that a second thread only costs


@pytest.fixture(scope="session")
def make_small_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLMEngine]:
    """Return what makes engines of one small checkpoint."""
    path = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", family="qwen3", seed=7)

    defaults = {"model": str(path), "dtype": "float32", "num_blocks": 128, "max_num_batched_tokens": 256}

    def make(**settings: Any) -> LLMEngine:
        return LLMEngine(**(defaults | settings))

    make.settings = defaults  # type: ignore[attr-defined]  # for another process
    return make
