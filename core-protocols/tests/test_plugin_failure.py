"""What contains the failures of plugins."""

from __future__ import annotations

import signal

import pytest

from sagellm.core import ConfigError, PluginError, call_plugin
from sagellm.core.plugins.failure import contained


class Panic(BaseException):
    """As extension modules raise it."""


def raised(error: BaseException, *passing: type[BaseException]) -> BaseException | None:
    with contained(*passing) as failure:
        raise error
    return failure.error


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3), GeneratorExit(), Panic()])
def test_whatever_a_plugin_raises_is_contained(error):
    assert raised(error) is error
    assert error.__traceback__ is not None


def test_a_block_that_raises_nothing_has_no_error():
    with contained() as failure:
        pass
    assert failure.error is None


def test_kinds_that_pass_are_raised_and_so_are_their_subclasses():
    with pytest.raises(ConfigError):
        raised(ConfigError("wrong"), PluginError, ConfigError)
    with pytest.raises(KeyError):
        raised(KeyError("x"), LookupError)
    assert isinstance(raised(ValueError(), LookupError), ValueError)


@pytest.fixture
def heeded_ctrl_c():
    """Python's own handler of Ctrl-C; a shell's background process inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_ctrl_c")
@pytest.mark.parametrize("passing", [(), (ValueError,)])
def test_ctrl_c_passes(passing):
    def interrupted() -> None:
        with contained(*passing):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_an_error_whose_text_cannot_be_had_is_told_by_its_type():
    class Mute(Exception):
        def __str__(self) -> str:
            raise SystemExit(4)

    def fail() -> None:
        raise Mute

    with pytest.raises(PluginError, match=r"acme: run\(\) failed; Mute \("):
        call_plugin("acme", "run()", fail)


def test_a_plugin_that_fails_is_named_with_the_line_where_it_did():
    def quits() -> None:
        raise SystemExit(3)

    with pytest.raises(
        PluginError, match=r"acme: run\(\) failed; SystemExit: 3 \(test_plugin_failure.py, line"
    ):
        call_plugin("acme", "run()", quits)
    with pytest.raises(MemoryError):
        call_plugin("acme", "run()", lambda: [0] * (1 << 60))
