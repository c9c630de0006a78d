"""Commands with options that take all the values that follow: `--compare A.json B.json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from sagellm.engines.cli.command import GroupedCommand


class VariadicCommand(GroupedCommand):
    """A command without arguments of its own, so that what follows an option can belong to it."""

    variadic: ClassVar[tuple[str, ...]] = ("--compare", "--goodput")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--option a b` as `--option a --option b`, which the parser knows."""
        return super().parse_args(ctx, list(repeat_options(args, self.variadic)))


def repeat_options(arguments: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, with the name of such an option before each of its values."""
    name: str | None = None
    is_first = False
    for argument in arguments:
        if argument.startswith("-"):
            name, is_first = (argument if argument in names else None), True
        elif name is not None:
            if not is_first:
                yield name
            is_first = False
        yield argument
