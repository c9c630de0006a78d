"""Takes tokens and names out of a trace, and leaves what a replay needs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from sagellm.core import EMPTY, Namespace, TraceRequest
from sagellm.engines.recording.block_names import BlockNames
from sagellm.engines.recording.pseudonyms import Pseudonyms
from sagellm.engines.recording.trace_rows import row_of
from sagellm.lab.simulation.prompts import kept_tokens


class AnonymousRows:
    """Makes the lines of one trace, with one salt that is kept nowhere."""

    def __init__(self, block_tokens: int) -> None:
        salt = os.urandom(32)
        self._block_tokens = block_tokens
        self._names, self._pseudonyms = BlockNames(salt, block_tokens), Pseudonyms(salt)

    def row(self, request: TraceRequest) -> dict[str, Any]:
        """Return the line of a request; one of which only lengths are known keeps them."""
        public = replace(
            request,
            token_ids=EMPTY,
            output_token_ids=EMPTY,
            block_ids=(),
            output_block_ids=(),
            tenant=self._pseudonyms.of(request.tenant),
            conversation=self._pseudonyms.of(request.conversation),
        )
        if not len(request.token_ids) and not request.block_ids:
            return row_of(public)
        num_prompt_tokens = request.num_prompt_tokens
        tokens = kept_tokens(request)
        if not len(request.output_token_ids):
            tokens = tokens[:num_prompt_tokens]  # named blocks may go beyond it
        names = self._names.name(Namespace(request.tenant), tokens.data, num_prompt_tokens)
        named = replace(
            public,
            block_ids=tuple(names.block_ids),
            block_tokens=self._block_tokens,
            output_block_ids=tuple(names.output_block_ids),
        )
        return row_of(named, names.agreement)
