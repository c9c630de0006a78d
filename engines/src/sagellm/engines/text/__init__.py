"""From tokens to text."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.text.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer

__all__ = [
    "IncrementalDetokenizer",
]

__getattr__ = lazy(
    __name__,
    {
        "IncrementalDetokenizer": ".detokenizer",
    },
)
