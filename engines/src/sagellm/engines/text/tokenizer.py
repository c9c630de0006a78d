"""What the engine asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

TEMPLATE_ARGUMENTS = frozenset(
    {
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"),
    }
)
"""The parameters of transformers' `apply_chat_template`, which are not variables of a template."""


class Tokenizer(Protocol):
    """A tokenizer as transformers has them, and as `JsonTokenizer` is without transformers.

    Calls come from several threads at once. `chat_template` is a template's source, or the sources of several
    by name.
    """

    chat_template: Any

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of all special tokens."""
        ...

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokens that were added to the vocabulary, by id; each has `content` and `special`."""
        ...

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        ...

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Mapping[str, Any]:
        """Encode a text; `input_ids` are its token ids."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Return the id of each token."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """Render messages by the template; without `tokenize`, return the text."""
        ...
