"""What every grammar provider must do. Subclass `GrammarContract` and override `make`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from sagellm.core.errors import InvalidRequestError
from sagellm.core.protocols.grammar import GrammarProtocol, StructureKind, Vocabulary
from sagellm.testing.cost import least_cpu_ns, slowness

STOP, SPECIAL = 256, 257

KIT_VOCABULARY = Vocabulary(
    tokens=(
        *(bytes([byte]) for byte in range(256)),
        *(b"", b"", b"yes", b"no", b"ye", b"not", b'{"', b'":', b"12", b"true", "ü".encode(), b"abc"),
    ),
    stop_token_ids=frozenset({STOP}),
)
"""All bytes, a stop token, a special token, and tokens of several bytes."""

KIT_TEXTS: tuple[tuple[StructureKind, str, bytes], ...] = (
    ("choice", '["yes","no","not yet","ü"]', b"not yet"),
    ("regex", "(abc|12)+[xy]", b"abc12x"),
    ("json_object", "", b'{"a":[12,true]}'),
    (
        "json",
        '{"type":"object","properties":{"yes":{"type":"boolean"}},"required":["yes"],'
        '"additionalProperties":false}',
        b'{"yes":true}',
    ),
    ("grammar", 'root ::= "no" tail\ntail ::= "t" tail | "!"', b"nott!"),
)
"""Of each kind a text, and an output that matches it."""

_NOT_SUPPORTED = "it refuses every text of the kit; override `texts`"


class GrammarContract:
    """The contract of GrammarProtocol as tests; needs numpy.

    Override `texts` to test others than those of the kit that the provider accepts.
    """

    vocabulary = KIT_VOCABULARY
    max_mask_s = 0.005  # of CPU time for one mask over the kit's vocabulary, on a server of 2023

    def make(self, vocabulary: Vocabulary) -> GrammarProtocol[Any, Any]:
        """Return a fresh provider."""
        raise NotImplementedError

    def texts(self) -> Sequence[tuple[StructureKind, str, bytes]]:
        """Return texts that the provider accepts, each with its kind and an output that matches it."""
        return KIT_TEXTS

    def prepared(self, provider: GrammarProtocol[Any, Any]) -> list[tuple[Any, list[int]]]:
        """Return compiled texts, each with the tokens of an output that matches it."""
        found = []
        for kind, text, output in self.texts():
            try:
                found.append((provider.prepare(kind, text), self.tokens(output)))
            except InvalidRequestError:
                continue
        if not found:
            pytest.skip(_NOT_SUPPORTED)
        return found

    def tokens(self, output: bytes) -> list[int]:
        """Return the longest tokens that make up an output, from its start."""
        found = []
        while output:
            fitting = [
                (len(text), token)
                for token, text in enumerate(self.vocabulary.tokens)
                if text and output.startswith(text)
            ]
            length, token = max(fitting)
            found.append(token)
            output = output[length:]
        return found

    def allowed(self, provider: GrammarProtocol[Any, Any], state: Any) -> set[int]:
        """Return the tokens that a mask allows."""
        import numpy as np

        words = np.zeros(self.vocabulary.num_words, np.uint32)
        if not provider.mask(state, words):
            return set(range(len(self.vocabulary.tokens)))
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(self.vocabulary.tokens)]
        return set(np.flatnonzero(bits).tolist())

    def test_an_output_that_matches_is_accepted_token_by_token(self) -> None:
        """Each of its tokens is in the mask before it, and stop tokens are in the last one."""
        provider = self.make(self.vocabulary)
        for compiled, tokens in self.prepared(provider):
            state = provider.start(compiled)
            for token in tokens:
                assert token in self.allowed(provider, state)
                assert provider.advance(state, [token]) == 1
            assert STOP in self.allowed(provider, state)
            assert provider.advance(state, [STOP]) == 1

    def test_masks_say_what_advances(self) -> None:
        """Of every token of the vocabulary, at every token of the output."""
        provider = self.make(self.vocabulary)
        for compiled, tokens in self.prepared(provider):
            state = provider.start(compiled)
            for token in [*tokens, None]:
                advancing = set()
                for each in range(len(self.vocabulary.tokens)):
                    if provider.advance(state, [each]):
                        advancing.add(each)
                        provider.rollback(state, 1)
                assert self.allowed(provider, state) == advancing
                assert SPECIAL not in advancing
                if token is not None:
                    provider.advance(state, [token])

    def test_a_refused_token_changes_nothing(self) -> None:
        """Tokens before it are appended, tokens after it are not."""
        provider = self.make(self.vocabulary)
        for compiled, tokens in self.prepared(provider):
            state, other = provider.start(compiled), provider.start(compiled)
            assert provider.advance(state, [*tokens[:1], SPECIAL, *tokens[1:]]) == 1
            assert provider.advance(other, tokens[:1]) == 1
            assert self.allowed(provider, state) == self.allowed(provider, other)

    def test_a_rollback_undoes_what_was_appended(self) -> None:
        """Any number of tokens, a stop token among them."""
        provider = self.make(self.vocabulary)
        for compiled, tokens in self.prepared(provider):
            state = provider.start(compiled)
            masks = []
            whole = [*tokens, STOP]
            for token in whole:
                masks.append(self.allowed(provider, state))
                provider.advance(state, [token])
            for num_tokens in range(1, len(whole) + 1):
                provider.rollback(state, num_tokens)
                assert self.allowed(provider, state) == masks[-num_tokens]
                assert provider.advance(state, whole[-num_tokens:]) == num_tokens

    def test_after_the_end_only_stop_tokens_may_follow(self) -> None:
        """However many."""
        provider = self.make(self.vocabulary)
        for compiled, tokens in self.prepared(provider):
            state = provider.start(compiled)
            assert provider.advance(state, [*tokens, STOP, STOP, STOP]) == len(tokens) + 3
            assert self.allowed(provider, state) == {STOP}
            assert provider.advance(state, tokens[:1]) == 0

    def test_states_share_nothing(self) -> None:
        """One sequence does not move another with the same text."""
        provider = self.make(self.vocabulary)
        for compiled, tokens in self.prepared(provider):
            one, other = provider.start(compiled), provider.start(compiled)
            before = self.allowed(provider, other)
            provider.advance(one, tokens)
            assert self.allowed(provider, other) == before

    def test_what_is_not_valid_is_refused(self) -> None:
        """Whatever the kind, by an InvalidRequestError; the provider goes on."""
        provider = self.make(self.vocabulary)
        refused: tuple[tuple[StructureKind, str], ...] = (
            ("json", '{"type": "nothing"}'),
            ("json", "{"),
            ("regex", "(abc"),
            ("choice", '"yes"'),
            ("grammar", "root ::= other"),
            ("structural_tag", "[]"),
        )
        for kind, text in refused:
            with pytest.raises(InvalidRequestError):
                provider.prepare(kind, text)
        self.prepared(provider)

    def test_metrics_count_what_was_done(self) -> None:
        """Texts, sequences and masks."""
        provider = self.make(self.vocabulary)
        prepared = self.prepared(provider)
        states = [provider.start(compiled) for compiled, _ in prepared]
        for state in states:
            self.allowed(provider, state)
        metrics = provider.metrics()
        assert (metrics.num_prepared, metrics.num_started) == (len(prepared), len(prepared))
        assert metrics.num_masks == len(prepared)
        assert metrics.num_refused == len(self.texts()) - len(prepared)

    def test_a_compiled_text_has_a_size_and_a_provider_ends(self) -> None:
        """The size is a number of bytes, 0 where it is not known; what was never used ends as well."""
        self.make(self.vocabulary).close()
        provider = self.make(self.vocabulary)
        for compiled, _ in self.prepared(provider):
            size_bytes = provider.size_bytes(compiled)
            assert isinstance(size_bytes, int)
            assert size_bytes >= 0
        provider.close()

    def test_a_mask_takes_microseconds(self) -> None:
        """The best of ten at each token of the outputs."""
        import numpy as np

        provider = self.make(self.vocabulary)
        words = np.zeros(self.vocabulary.num_words, np.uint32)
        for compiled, tokens in self.prepared(provider):
            state = provider.start(compiled)
            for token in tokens:
                best_ns = least_cpu_ns(partial(provider.mask, state, words), 10)
                assert best_ns / 1e9 < self.max_mask_s * slowness()
                provider.advance(state, [token])
