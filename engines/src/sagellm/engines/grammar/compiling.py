"""Compiles texts with xgrammar."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sagellm.core.errors import InvalidRequestError
from sagellm.engines.grammar.binding import xgrammar_core
from sagellm.engines.grammar.json_schema import lowered
from sagellm.engines.grammar.structural_tags import lowered_tags

if TYPE_CHECKING:
    from sagellm.core.protocols.grammar import StructureKind, Vocabulary

_PREFIX = re.compile(
    r"^(?:\[[\d:]+\] )?(?:\S+\.\w+:\d+: )?(?:Check failed: \(.*?\) is (?:false|true): )?", re.DOTALL
)
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 ]")
_MAX_TOLD = 300
_NUM_TRIED = 64
"""Tokens that are tried before a grammar is accepted: some become slow only after a few."""
_RAW = 0
"""The type of a vocabulary whose tokens are bytes as they stand in a text."""


def tokenizer_info(vocabulary: Vocabulary) -> Any:
    """Return a vocabulary as xgrammar keeps it. Takes 0.1 s for 150,000 tokens.

    Unlike the constructor, this does not hold the interpreter's lock, for which the step thread would wait.
    """
    metadata = {
        "vocab_type": _RAW,
        "vocab_size": len(vocabulary.tokens),
        "add_prefix_space": False,
        "stop_token_ids": sorted(vocabulary.stop_token_ids),
    }
    make = xgrammar_core().TokenizerInfo.from_vocab_and_metadata
    return make(list(vocabulary.tokens), json.dumps(metadata))


def new_matcher(compiled: Any) -> Any:
    """Return a matcher, which ends with a stop token, of a compiled text."""
    return xgrammar_core().GrammarMatcher(compiled, None, False, -1, None)


class Compiler:
    """Compiles for one vocabulary. `max_whitespace` bounds what stands between two parts of a JSON text."""

    def __init__(self, vocabulary: Vocabulary, *, max_whitespace: int, additional_properties: bool) -> None:
        info = tokenizer_info(vocabulary)
        self._compiler = xgrammar_core().GrammarCompiler(info, 1, False, -1, False)  # one thread
        self._words = np.zeros(vocabulary.num_words, np.int32)
        self._max_whitespace, self._additional_properties = max_whitespace, additional_properties

    def compile(self, kind: StructureKind, text: str, max_mask_ms: float) -> bytes:
        """Return the compiled form. Raises InvalidRequestError, also if a mask takes longer."""
        try:
            compiled = self._compiled(kind, text)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{kind}: {error}") from error
        except RuntimeError as error:
            raise InvalidRequestError(f"{kind}: {_told(error)}") from error
        if (mask_ms := self._slowest_ms(compiled, max_mask_ms)) > max_mask_ms:
            raise InvalidRequestError(
                f"{kind}: a mask takes {mask_ms:.0f} ms, more than {max_mask_ms:g}; give a simpler one"
            )
        return str(compiled.serialize_json()).encode()

    def _slowest_ms(self, compiled: Any, enough_ms: float) -> float:
        """Return the longest time of a mask and a token in a first text, or the first above enough."""
        matcher = new_matcher(compiled)
        slowest = 0.0
        for _ in range(_NUM_TRIED):
            started = time.thread_time_ns()
            is_masked = matcher.fill_next_token_bitmask(self._words, 0, False)
            matcher.accept_token(self._any_of() if is_masked else 0, False)
            slowest = max(slowest, (time.thread_time_ns() - started) / 1e6)
            if matcher.is_terminated() or slowest > enough_ms:
                break
        return slowest

    def _any_of(self) -> int:
        """Return a token that the last mask allows: the first one from a word that has any."""
        word = int(np.flatnonzero(self._words)[0])
        bits = int(self._words[word]) & 0xFFFFFFFF
        return 32 * word + (bits & -bits).bit_length() - 1

    def _compiled(self, kind: StructureKind, text: str) -> Any:
        match kind:
            case "json" | "json_object":
                schema = '{"type":"object"}' if kind == "json_object" else text
                return self._json(lowered(schema, additional_properties=self._additional_properties))
            case "regex":
                return self._compiler.compile_regex(text)
            case "choice":
                return self._compiler.compile_grammar_from_strings(_choice(text), "root")
            case "grammar":
                return self._compiler.compile_grammar_from_strings(text, "root")
            case "structural_tag":
                return self._compiler.compile_structural_tag(
                    lowered_tags(
                        text,
                        additional_properties=self._additional_properties,
                        max_whitespace=self._max_whitespace,
                    )
                )

    def _json(self, schema: str) -> Any:
        has_space = self._max_whitespace > 0
        separators = None if has_space else (",", ":")
        most = self._max_whitespace if has_space else None
        # no indentation; strictness is in the schema; properties come in its order
        return self._compiler.compile_json_schema(schema, has_space, None, separators, False, most, False)


def _choice(text: str) -> str:
    """Return the grammar of a JSON list of texts."""
    try:
        choices = json.loads(text)
    except ValueError:
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise InvalidRequestError("it must be a list of texts, at least one")
    if "" in choices:
        raise InvalidRequestError("it has an empty text; give texts of at least one character")
    return "root ::= " + " | ".join(_quoted(each) for each in dict.fromkeys(choices))


def _quoted(text: str) -> str:
    """Return a text as a grammar writes it, with an escape for all but letters, digits and spaces."""
    return '"' + _NOT_PLAIN.sub(lambda found: f"\\U{ord(found[0]):08x}", text) + '"'


def _told(error: Exception) -> str:
    """Return a message of xgrammar without its place in the source, as one line."""
    told = " ".join(_PREFIX.sub("", str(error).strip(), count=1).split())
    return told if len(told) <= _MAX_TOLD else f"{told[:_MAX_TOLD]}…"
