"""The programs `sage` and `sagellm`. Commands are imported when they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main", "main_llm"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `sage`. Ends the process: 0 done, 1 failed, 2 used wrongly."""
    from sagellm.engines.cli.app import sage
    from sagellm.engines.cli.run import run

    run(sage, "sage", arguments)


def main_llm(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `sagellm`, which is `sage llm`. Ends the process like `main`."""
    from sagellm.engines.cli.app import sagellm
    from sagellm.engines.cli.run import run

    run(sagellm, "sagellm", arguments)
