"""Which parsers a model's answers need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sagellm.core import PluginRegistry, ProviderSpec, ReasoningParserProtocol, ToolParserProtocol, get_logger
from sagellm.core.plugins.failure import contained
from sagellm.engines.config.schema import AUTO
from sagellm.engines.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from sagellm.engines.text.tokenizer import Tokenizer

logger = get_logger(__name__)

PROMPT_END_TOKENS = 32
"""The end of a prompt, in which its template may have begun or ended the model's reasoning."""


@dataclass(frozen=True, kw_only=True)
class ChosenParsers:
    """The parsers of a model's answers; None where there is nothing to find."""

    tool_parser: ToolParserProtocol | None = None
    reasoning_parser: ReasoningParserProtocol | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """The tags that are special tokens, which answers show only if asked to."""
    other_special: re.Pattern[str] | None = None
    """Special tokens that are not tags: where the tags are shown, these must be taken out."""

    @classmethod
    def choose(
        cls,
        tokenizer: Tokenizer | None,
        tool_parser: ProviderSpec,
        reasoning_parser: ProviderSpec,
        registry: PluginRegistry | None = None,
    ) -> ChosenParsers:
        """Make the parsers that are named, or for `auto` those that fit the model's template.

        Raises ConfigError for an unknown option, UnknownProviderError, and PluginError if a factory fails.
        """
        source = ChatTemplate(tokenizer).source
        if tokenizer is None or not source:
            return cls()
        installed = registry or PluginRegistry.load()
        tools: ToolParserProtocol | None = _chosen(installed, "tool_parser", tool_parser, source)
        reasoning: ReasoningParserProtocol | None = _chosen(
            installed, "reasoning_parser", reasoning_parser, source
        )
        special = _special_tokens(tokenizer)
        tags = (*(tools.special_tokens if tools else ()), *((reasoning and reasoning.tags("")) or ()))
        token_ids = {tag: special[tag] for tag in tags if tag in special}
        others = sorted((text for text in special if text and text not in token_ids), key=len, reverse=True)
        return cls(
            tool_parser=tools,
            reasoning_parser=reasoning,
            token_ids=token_ids,
            other_special=re.compile("|".join(map(re.escape, others))) if token_ids and others else None,
        )


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    return {
        str(getattr(token, "content", token)): token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }


def _chosen(registry: PluginRegistry, kind: str, spec: ProviderSpec, source: str) -> Any:
    if spec.name != AUTO:
        return None if spec.name == "null" else registry.make(kind, spec, chat_template=source)
    for entry in sorted(registry.providers(kind), key=lambda entry: entry.provider.name):
        name = entry.provider.name
        with contained() as failure:
            made = registry.make(kind, name, chat_template=source)
            if made.fits(source):
                logger.info("the %s is %s: it fits the model's chat template", kind.replace("_", " "), name)
                return made
        if failure.error is not None:
            logger.warning("%s failed, and is left out: %s", entry.label, failure.error)
    return None
