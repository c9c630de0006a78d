"""The grammar provider `xgrammar`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from sagellm.core.errors import ConfigError, InvalidRequestError
from sagellm.core.protocols.grammar import GrammarMetrics, GrammarProtocol, StructureKind, Vocabulary
from sagellm.engines.grammar.binding import xgrammar_core
from sagellm.engines.grammar.compile_process import CompileLimits, CompileProcess
from sagellm.engines.grammar.compiling import new_matcher, tokenizer_info

if TYPE_CHECKING:
    from sagellm.core.protocols.grammar import Words

_MAX_COMPILE_S = 600


@dataclass(slots=True, eq=False)
class MatcherState:
    """A sequence's matcher, and how many stop tokens came after the one that ended it."""

    matcher: Any  # xgrammar's
    num_after_end: int = 0


class XGrammar(GrammarProtocol[Any, MatcherState]):
    """Grammars of xgrammar, compiled in a process of their own; its compiled form is read in this one.

    JSON schemas are first rewritten to what xgrammar asserts (`json_schema`); what it would ignore is
    refused.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        max_whitespace: int = 8,
        additional_properties: bool = False,
        compile_s: float = 10.0,
        compile_memory_mib: int = 1024,
    ) -> None:
        """Create a provider. `max_whitespace` counts characters between two parts of a JSON text.

        `additional_properties` is whether an object may have properties beside those that its schema names,
        where the schema does not say. Raises ConfigError for a limit out of range.
        """
        if max_whitespace < 0:
            raise ConfigError(f"max_whitespace is {max_whitespace}; it must be 0 or more characters")
        if not 0 < compile_s <= _MAX_COMPILE_S or compile_memory_mib < 1:
            raise ConfigError(
                f"compile_s is {compile_s} and compile_memory_mib {compile_memory_mib}; they must be above 0 "
                f"and compile_s at most {_MAX_COMPILE_S}"
            )
        self._vocabulary = vocabulary
        limits = CompileLimits(seconds=compile_s, memory_bytes=compile_memory_mib << 20)
        self._process = CompileProcess(
            vocabulary, limits, max_whitespace=max_whitespace, additional_properties=additional_properties
        )
        self._info: Any = None  # the vocabulary as xgrammar keeps it
        self._stop_words = np.zeros(vocabulary.num_words, np.uint32)
        for token_id in vocabulary.stop_token_ids:
            self._stop_words[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._metrics = GrammarMetrics()

    def prepare(self, kind: StructureKind, text: str) -> Any:
        """Compile a text. Raises InvalidRequestError, also where xgrammar is not installed."""
        try:
            self._check()
            self._process.start()  # while it reads the vocabulary, so does this process
            info = self._vocabulary_info()
            data = self._process.compile(kind, text)
        except InvalidRequestError:
            self._metrics.num_refused += 1
            raise
        compiled = xgrammar_core().CompiledGrammar.deserialize_json(data.decode(), info)
        self._metrics.num_prepared += 1
        return compiled

    def start(self, compiled: Any) -> MatcherState:
        """Return a new matcher."""
        self._metrics.num_started += 1
        return MatcherState(new_matcher(compiled))

    def mask(self, state: MatcherState, words: Words) -> bool:
        """Have the matcher write the mask."""
        self._metrics.num_masks += 1
        if state.matcher.is_terminated():
            words[:] = self._stop_words
            return True
        return bool(state.matcher.fill_next_token_bitmask(words.view(np.int32), 0, False))

    def advance(self, state: MatcherState, token_ids: Sequence[int]) -> int:
        """Append tokens up to the first that is refused."""
        matcher = state.matcher
        for place, token_id in enumerate(token_ids):
            if matcher.is_terminated():
                if token_id not in self._vocabulary.stop_token_ids:
                    return place
                state.num_after_end += 1
            elif not matcher.accept_token(token_id, False):
                return place
        return len(token_ids)

    def rollback(self, state: MatcherState, num_tokens: int) -> None:
        """Remove the last tokens."""
        after_end = min(num_tokens, state.num_after_end)
        state.num_after_end -= after_end
        if num_tokens > after_end:
            state.matcher.rollback(num_tokens - after_end)

    def metrics(self) -> GrammarMetrics:
        """Return the counts."""
        return replace(self._metrics)

    def size_bytes(self, compiled: Any) -> int:
        """Return what xgrammar says."""
        return int(compiled.memory_size_bytes())

    def close(self) -> None:
        """End the process that compiles."""
        self._process.close()

    def _check(self) -> None:
        if find_spec("xgrammar") is None:
            raise InvalidRequestError(
                "structured outputs need xgrammar, which is not installed where the engine runs; install it: "
                "pip install 'sagellm-engines[grammar]'"
            )
        if not self._vocabulary.stop_token_ids:
            raise InvalidRequestError(
                "structured outputs need a token that ends a text, and this model names none (eos_token_id)"
            )

    def _vocabulary_info(self) -> Any:
        if self._info is None:
            self._info = tokenizer_info(self._vocabulary)
        return self._info
