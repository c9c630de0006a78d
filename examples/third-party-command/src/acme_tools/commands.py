"""The commands, each a `typer.Typer` with one function."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from sagellm.core import PluginRegistry

blocks, count = typer.Typer(), typer.Typer()


@blocks.command()
def _blocks(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")],
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
) -> None:
    """Print how many KV blocks a prompt takes."""
    typer.echo(f"{-(-tokens // block_size)} blocks of {block_size} tokens")


@count.command()
def _count() -> None:
    """Print how many providers of each kind are installed."""
    kinds = Counter(entry.provider.kind for entry in PluginRegistry.load().providers())
    for kind, number in sorted(kinds.items()):
        typer.echo(f"{number:3}  {kind}")
