"""Standard streams and arguments in every locale."""

from __future__ import annotations

import codecs
import os
import sys


def use_unicode() -> None:
    """Have the standard streams read and write all of Unicode.

    Where they are ASCII, as in the C locale without Python's UTF-8 mode, they become UTF-8. In another
    encoding, characters that it lacks are written as escapes. Bytes that are no text pass unchanged.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a test's or an embedding program's may have none
        if reconfigure is None:
            continue
        encoding = codecs.lookup(stream.encoding or "ascii").name
        if encoding == "ascii":
            reconfigure(encoding="utf-8", errors="surrogateescape")
        elif stream is not sys.stdin:
            reconfigure(errors="surrogateescape" if encoding == "utf-8" else "backslashreplace")


def is_utf8() -> bool:
    """Say whether standard output is UTF-8."""
    return codecs.lookup(getattr(sys.stdout, "encoding", None) or "ascii").name == "utf-8"


def as_text(argument: str) -> str:
    """Return the text of an argument, which an ASCII locale has left undecoded.

    Only for what is text: a path must stay as the locale has it.
    """
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument
