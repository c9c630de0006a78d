"""vLLM's masks of structured output without a model, for `structured_output.py`. Written for 0.32."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
import xgrammar
from rounds import answer
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.utils import apply_grammar_bitmask


class Backend(XgrammarBackend):
    """Its backend of a vocabulary instead of a tokenizer."""

    def __post_init__(self) -> None:
        """Make the compiler with its settings, but for the size of a cache that is not reached."""
        self.disable_any_whitespace, self.num_speculative_tokens = False, 0
        tokens, stop_token_ids = self.tokenizer
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=stop_token_ids
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=8, cache_enabled=True)


class Masks:
    """One vocabulary, and the masks of texts in it."""

    def __init__(self) -> None:
        self._backend: Backend | None = None

    def __call__(self, what: str, *arguments: Any) -> Any:
        """Take a vocabulary, or walk a text."""
        return getattr(self, what)(*arguments)

    def vocabulary(self, tokens: list[str], stop_token_ids: list[int]) -> None:
        """Take the vocabulary, bytes in hexadecimal."""
        given = [bytes.fromhex(token) for token in tokens], stop_token_ids
        self._backend = Backend(vllm_config=None, tokenizer=given, vocab_size=len(tokens))

    def walk(self, kind: str, text: str, token_ids: list[int], rounds: int) -> dict[str, list[float]]:
        """Return what each mask took in µs: to fill in the scheduler, and to apply in the worker."""
        assert self._backend is not None, "the vocabulary comes first"
        mask = self._backend.allocate_token_bitmask(1)
        logits = torch.zeros(1, self._backend.vocab_size)
        step, batch = SimpleNamespace(scheduled_spec_decode_tokens={}), SimpleNamespace(req_ids=["one"])
        fill_us, apply_us = [], []
        for _ in range(rounds):
            grammar = self._backend.compile_grammar(StructuredOutputOptions[kind.upper()], text)
            for token_id in token_ids:
                fill_us.append(_spent_us(grammar.fill_bitmask, mask, 0))
                output = SimpleNamespace(structured_output_request_ids=["one"], grammar_bitmask=mask.numpy())
                apply_us.append(_spent_us(apply_grammar_bitmask, step, output, batch, logits))
                assert grammar.accept_tokens("one", [token_id]), "the text matches"
        return {"fill_us": fill_us, "apply_us": apply_us}


def _spent_us(call: Callable[..., object], *arguments: object) -> float:
    started_ns = time.perf_counter_ns()
    call(*arguments)
    return (time.perf_counter_ns() - started_ns) / 1e3


if __name__ == "__main__":
    answer(lambda: (Masks(), {"vllm": vllm.__version__, "xgrammar": version("xgrammar")}))
