"""Makes the provider of grammars that a configuration names, from the model's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sagellm.engines.engine_core.preparing import no_grammar

if TYPE_CHECKING:
    from sagellm.core import GrammarProtocol
    from sagellm.engines.loading.load import OpenedModel
    from sagellm.engines.modules import Modules


def make_grammar(modules: Modules, opened: OpenedModel, vocab_size: int) -> GrammarProtocol[Any, Any]:
    """Make the provider. Raises InvalidRequestError if the model has no tokenizer."""
    from sagellm.engines.grammar.vocabulary import vocabulary_of
    from sagellm.engines.loading.source import resolve_tokenizer
    from sagellm.engines.loading.tokenizer import open_tokenizer

    tokenizer = opened.tokenizer or open_tokenizer(resolve_tokenizer(modules.config.model))
    if tokenizer is None:
        return no_grammar()
    vocabulary = vocabulary_of(tokenizer, vocab_size, opened.generation.eos_token_ids)
    made: GrammarProtocol[Any, Any] = modules.make("grammar", modules.config.grammar.name, vocabulary)
    return made
