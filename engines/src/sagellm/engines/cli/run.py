"""Runs a program: any failure becomes one message and an exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from typer.main import get_command

from sagellm.core import SageLLMError, get_logger
from sagellm.engines.cli.streams import use_unicode
from sagellm.engines.logging import is_json
from sagellm.engines.usage_errors import USAGE_ERRORS

FAILED = 1
USED_WRONGLY = 2
INTERRUPTED = 130


@dataclass
class Session:
    """What the commands of one run share (`ctx.obj`)."""

    debug: bool = False


class _LogFormatter(logging.Formatter):
    """Writes messages alone, and tracebacks with --debug."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def formatException(self, ei: Any) -> str:
        """Render a traceback, or nothing."""
        return super().formatException(ei) if self._session.debug else ""


def run(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `app` and exit: 0 done, 1 failed, 2 used wrongly (a bad flag, setting or name), 130 stopped."""
    use_unicode()
    session = Session(debug=os.environ.get("SAGELLM_DEBUG", "0") not in ("", "0"))
    logger, handler = get_logger("sagellm"), logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_LogFormatter(session))
    logger.addHandler(handler)  # until a command configures the log
    try:
        result = get_command(app)(
            args=None if arguments is None else list(arguments), prog_name=program, obj=session
        )
    except SystemExit as end:
        if end.code == INTERRUPTED:  # a terminal shows ^C in the text
            typer.echo("\nstopped" if sys.stderr.isatty() else "stopped", err=True)
        raise
    except Exception as error:
        if is_json():  # of a server
            logger.critical("%s", _message(error), exc_info=error if session.debug else None)
        elif session.debug:
            traceback.print_exc()
        else:
            typer.echo(_message(error), err=True)
        sys.exit(USED_WRONGLY if isinstance(error, USAGE_ERRORS) else FAILED)
    finally:
        logger.removeHandler(handler)
    sys.exit(result)


def _message(error: Exception) -> str:
    """Phrase an error for people; the last line is the cause."""
    if isinstance(error, SageLLMError):
        text = f"Error: {error}"
        cause = error.__cause__
        return text if cause is None or str(cause) in text else f"{text}\nCaused by {_named(cause)}"
    if isinstance(error, OSError) and _is_from_printing(error):
        return f"Error: standard output cannot be written: {error.strerror}"
    return f"Error: {_named(error)}\nThis is unexpected; --debug or SAGELLM_DEBUG=1 shows where it happened."


def _is_from_printing(error: OSError) -> bool:
    """Say whether `typer.echo` raised the error for standard output; the error itself names no file."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = frames[-1]
    return innermost.f_code.co_name == "echo" and innermost.f_locals.get("file") is sys.stdout


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
