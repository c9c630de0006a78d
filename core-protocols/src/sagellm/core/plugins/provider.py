"""What a plugin offers, named but not yet imported: implementations of kinds, and commands."""

from __future__ import annotations

import re
from typing import NamedTuple


class Kind(NamedTuple):
    """What an engine passes to the factories of a kind; all other parameters are options, which users set.

    `call` is that call as documentation writes it. A keyword that a factory does not have is not passed.
    """

    call: str
    config: str = ""  # a dataclass of core; its fields are options too, and make the first argument
    may_hold_secrets: bool = False  # no message shows the value of an option

    @property
    def num_positional(self) -> int:
        """The number of positional arguments."""
        return len(re.findall(r"[(,]\s*\w+(?=[,)])", self.call))

    @property
    def keywords(self) -> frozenset[str]:
        """The names of the keyword arguments."""
        return frozenset(re.findall(r"(\w+)=", self.call))


KINDS = {
    "attention_backend": Kind("factory(num_heads=..., num_kv_heads=..., head_dim=..., block_size=...)"),
    "checkpoint_format": Kind("factory()"),
    "draft_proposer": Kind("factory()"),
    "engine": Kind("factory(config, registry=..., runtime=...)"),
    "engine_adapter": Kind("factory()"),
    "eviction_policy": Kind("factory(lifetime_predictor=...)"),
    "executor": Kind("factory(worker)"),
    "forward_backend": Kind(
        "factory(spec, weights, device=..., dtype=..., attention=..., quantizer=..., "
        "sparsifier=..., shard=..., packed_cache=...)"
    ),
    "grammar": Kind("factory(vocabulary)"),
    "kv_allocator": Kind("factory(total_blocks)"),
    "kv_offload": Kind("factory(memory, tiers=..., rule=..., clock=...)"),
    "kv_pool": Kind("factory(total_blocks, block_size, allocator=..., clock=...)"),
    "kv_saves": Kind("factory(memory, space, store=..., fingerprint=..., runtime=...)"),
    "kv_tier": Kind("factory(runtime=..., store_key=...)", may_hold_secrets=True),
    "lifetime_predictor": Kind("factory()"),
    "logits_processor": Kind("factory(vocab_size)"),
    "model_family": Kind("factory()"),
    "prefix_cache": Kind("factory(max_blocks, block_size, eviction_policy=..., clock=..., identity=...)"),
    "quantizer": Kind("factory(config)", config="protocols.quantizer:QuantizationConfig"),
    "reasoning_parser": Kind("factory(chat_template=...)"),
    "scheduler": Kind(
        "factory(max_num_batched_tokens=..., max_num_seqs=..., block_size=..., "
        "probe=..., epoch=..., clock=..., cost=..., step_target_ms=...)"
    ),
    "scheduler_pass": Kind("factory()"),
    "sparsifier": Kind("factory(config)", config="protocols.sparsifier:SparsityConfig"),
    "tool_parser": Kind("factory(chat_template=...)"),
    "topology": Kind("factory()"),
    "trace_reader": Kind("factory(tokenize=...)"),
}
"""The kinds of implementation. A kind is added together with its protocol and first user."""


class Provider(NamedTuple):
    """One implementation of one kind, under the name that configurations use.

    `target` is `module:attribute` and is imported only when the provider is chosen. Where a setting has the
    engine choose among all that are installed, as `forward.backend: auto` does, one that is not
    `is_automatic` is left out, without an import. `sage llm policy list` shows what measurements recommend it
    for and what they found, in a sentence each.
    """

    kind: str
    name: str
    target: str
    summary: str
    is_automatic: bool = True
    recommended_for: str = ""
    measured: str = ""


class Command(NamedTuple):
    """A command of `sage llm`, under the words that users type: `bench`, or `plugins check` within a group.

    `target` is `module:attribute` of a `typer.Typer`, imported only when the command is called. Help leaves
    out a command without a summary, such as an old name.
    """

    name: str
    target: str
    summary: str
