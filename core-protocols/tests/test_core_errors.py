"""The tree of errors, its drawing, and the suggestion of a nearest name."""

from __future__ import annotations

import builtins
import inspect
import re

import pytest

from sagellm import testing
from sagellm.core import AuditError, OutOfBlocksError, errors, nearest

LINE = re.compile(r"^(?P<indent>[│ ├└─]*)(?P<name>\w+)(?: \((?P<also>\w+)\))?")


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Read the drawing: each class with the one it hangs under and the other base it names."""
    found: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines()[2:]:  # type: ignore[union-attr]
        match = LINE.match(line)
        assert match, line
        depth = len(match["indent"]) // 4
        path[depth:] = [match["name"]]
        found[match["name"]] = (path[depth - 1] if depth else None, match["also"])
    return found


def classes() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }


def test_every_error_stands_in_the_drawing() -> None:
    assert set(drawn()) == set(classes())


@pytest.mark.parametrize("name", sorted(classes()))
def test_the_drawing_shows_the_bases(name: str) -> None:
    parent, also = drawn()[name]
    bases = {base.__name__ for base in classes()[name].__bases__}
    assert bases == ({base for base in (parent, also) if base} or {"Exception"})


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("OutOfBlocksError", "MemoryError"),
        ("InvalidRequestError", "ValueError"),
        ("ConfigError", "ValueError"),
        ("UnknownProviderError", "LookupError"),
        ("UnknownKindError", "LookupError"),
        ("PluginImportError", "ImportError"),
        ("PluginMethodError", "TypeError"),
        ("EngineError", "RuntimeError"),
    ],
)
def test_errors_keep_the_builtin_families(name: str, family: str) -> None:
    assert issubclass(classes()[name], getattr(builtins, family))


def test_an_audit_error_is_not_a_plugin_error_and_the_kit_still_exports_it() -> None:
    assert not issubclass(AuditError, Exception)
    assert testing.AuditError is AuditError


def test_running_out_of_blocks_says_how_many() -> None:
    error = OutOfBlocksError("3 blocks asked for, 1 free", needed=3, available=1)
    assert (str(error), error.needed, error.available) == ("3 blocks asked for, 1 free", 3, 1)


def test_the_nearest_name_is_suggested_and_a_far_one_is_not() -> None:
    assert nearest("lur", ["lru", "fifo"]) == " Did you mean 'lru'?"
    assert nearest("QoS", ["lru", "qos"]) == " Did you mean 'qos'?"
    assert nearest("belady", ["lru", "fifo"]) == ""
    assert nearest("lru", []) == ""
