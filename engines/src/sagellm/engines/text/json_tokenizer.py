"""A tokenizer of the library tokenizers with special tokens and a chat template, without transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer as Backend

from sagellm.engines.text.plain_chats import render_plain_chat
from sagellm.engines.text.tokenizer import TEMPLATE_ARGUMENTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNLIMITED = int(1e30)  # as transformers writes it


class JsonTokenizer:
    """Encodes, decodes and renders as transformers' tokenizer of the same files does.

    Any other attribute or argument of transformers' tokenizers is passed on to that one, which is loaded when
    it is first asked for. `settings` are those with which transformers would have made it.
    """

    def __init__(
        self,
        backend: Backend,
        settings: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        *,
        class_name: str,
        chat_template: Any,
        load: Callable[[], PreTrainedTokenizerBase],
    ) -> None:
        self.backend_tokenizer = backend
        self.init_kwargs = settings
        self.special_tokens_map = dict(special_tokens)
        self.extra_special_tokens = [str(token) for token in settings.get("extra_special_tokens") or ()]
        length = settings.get("model_max_length", settings.get("max_len"))
        self.model_max_length = _UNLIMITED if length is None else length
        self.class_name = class_name
        self.chat_template = chat_template
        self._load = load

    @cached_property
    def transformers(self) -> PreTrainedTokenizerBase:
        """transformers' tokenizer of the same files."""
        return self._load()

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of all special tokens, named ones first."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return [self._id_of(token) for token in self.all_special_tokens]

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """The tokens that were added to the vocabulary, by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(
        self, text: Any, *, add_special_tokens: bool = True, verbose: bool = True, **options: Any
    ) -> Mapping[str, Any]:
        """Encode a text; `input_ids` are its token ids."""
        if options or not isinstance(text, str):
            encoded: Mapping[str, Any] = self.transformers(
                text, add_special_tokens=add_special_tokens, verbose=verbose, **options
            )
            return encoded
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Return the text of tokens."""
        if options or not isinstance(token_ids, list):
            return self.transformers.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return each token as the vocabulary spells it, None for an id that is not in it."""
        look_up = self.backend_tokenizer.id_to_token
        return look_up(ids) if isinstance(ids, int) else [look_up(int(token_id)) for token_id in ids]

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """Render messages by the template; `options` are its variables. Raises what the template raises."""
        call: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if tokenize or not TEMPLATE_ARGUMENTS.isdisjoint(options):
            call["tools"] = tools
            return self.transformers.apply_chat_template(conversation, tokenize=tokenize, **call, **options)
        source = self._template(has_tools=bool(tools))
        if not options and not tools:
            plain = render_plain_chat(source, conversation, **call)
            if plain is not None:
                return plain
        from sagellm.engines.text.jinja_templates import render_chat

        return render_chat(source, conversation, self.special_tokens_map | options, tools=tools, **call)

    def __getattr__(self, name: str) -> Any:
        """Return a named special token or its id, or what transformers' tokenizer has by that name."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in NAMED_TOKENS:
            return self.special_tokens_map.get(name)
        if name.removesuffix("_id") in NAMED_TOKENS:
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if token is None else self._id_of(token)
        return getattr(self.transformers, name)

    def _id_of(self, token: str) -> Any:
        """Return the id of a token; one that the vocabulary lacks is the unknown one."""
        token_id = self.backend_tokenizer.token_to_id(token)
        unknown = self.special_tokens_map.get("unk_token")
        if token_id is None and unknown not in (None, token):
            return self._id_of(str(unknown))
        return token_id

    def _template(self, *, has_tools: bool) -> str:
        if not isinstance(self.chat_template, dict):
            return str(self.chat_template)
        if has_tools and "tool_use" in self.chat_template:
            return str(self.chat_template["tool_use"])
        if "default" not in self.chat_template:
            raise ValueError(f"none of the chat templates {sorted(self.chat_template)} is called default")
        return str(self.chat_template["default"])
