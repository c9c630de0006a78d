"""What tests and benchmarks of an engine need: checkpoints made on the spot."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.testing.checkpoints import (
        make_checkpoint as make_checkpoint,
        qwen3_0_6b_config as qwen3_0_6b_config,
    )
    from sagellm.engines.testing.tokenizers import make_tokenizer as make_tokenizer

_MODULE_OF = {
    "make_checkpoint": ".checkpoints",
    "make_tokenizer": ".tokenizers",
    "qwen3_0_6b_config": ".checkpoints",
}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy(__name__, _MODULE_OF)
