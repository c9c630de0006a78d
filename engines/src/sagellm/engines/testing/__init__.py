"""What tests and benchmarks of an engine need: checkpoints made on the spot."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.testing.checkpoints import (
        make_checkpoint as make_checkpoint,
        qwen3_0_6b_config as qwen3_0_6b_config,
    )
    from sagellm.engines.testing.tokenizers import make_tokenizer as make_tokenizer

__all__ = ["make_checkpoint", "make_tokenizer", "qwen3_0_6b_config"]

__getattr__ = lazy(
    __name__,
    {
        "make_checkpoint": ".checkpoints",
        "make_tokenizer": ".tokenizers",
        "qwen3_0_6b_config": ".checkpoints",
    },
)
