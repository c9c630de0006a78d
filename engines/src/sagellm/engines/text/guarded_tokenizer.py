"""Calls a checkpoint's tokenizer, whose exceptions and panics become errors of one request.

A Rust panic arrives as pyo3's PanicException, a BaseException that would slip past every `except Exception`
and end the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sagellm.engines.text.errors import TokenizerError

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer

_MAX_TOLD = 200  # characters of a tokenizer's message


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text. Raises TokenizerError."""
    try:
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    except BaseException as error:
        if not is_foreign(error):
            raise
        raise tokenizer_error("the model's tokenizer cannot encode this text", error) from error


def decode(tokenizer: Any, token_ids: Sequence[int], **options: Any) -> str:
    """Return the text of tokens; `tokenizer` is transformers' or a `tokenizers.Tokenizer`.

    Raises TokenizerError.
    """
    try:
        return str(tokenizer.decode(list(token_ids), **options))
    except BaseException as error:
        if not is_foreign(error):
            raise
        raise tokenizer_error("the model's tokenizer cannot decode these tokens", error) from error


def is_foreign(error: BaseException) -> bool:
    """Say whether an error is an exception or a Rust panic.

    As opposed to KeyboardInterrupt and SystemExit. Each Rust extension module has its own PanicException, so
    it is recognised by name.
    """
    return isinstance(error, Exception) or any(
        kind.__name__ == "PanicException" for kind in type(error).__mro__
    )


def tokenizer_error(summary: str, error: BaseException) -> TokenizerError:
    """Return the error for an exception of a tokenizer, which goes into its detail."""
    return TokenizerError(summary, f"{type(error).__name__}: {str(error)[:_MAX_TOLD]}")
