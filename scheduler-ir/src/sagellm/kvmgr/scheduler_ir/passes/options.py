"""Checks of the options of passes."""

from __future__ import annotations

import math

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.scheduler_ir import SchedulerPassProtocol


def require_positive(checked: SchedulerPassProtocol, *options: str, optional: bool = False) -> None:
    """Raise ConfigError unless these options are finite numbers above 0, or None if they are optional."""
    for option in options:
        value = getattr(checked, option)
        if not (value is None and optional) and not (_is_number(value) and value > 0):
            none = " or null" if optional else ""
            raise ConfigError(f"{checked.name}: {option} is {value!r}; it must be a number above 0{none}")


def require_between(
    checked: SchedulerPassProtocol, least: float, most: float, *options: str, is_count: bool = False
) -> None:
    """Raise ConfigError unless these options are numbers in a closed range, whole ones for counts."""
    for option in options:
        value = getattr(checked, option)
        if not _is_number(value) or not least <= value <= most or (is_count and value != int(value)):
            kind = "a whole number" if is_count else "a number"
            bounds = f"of at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
            raise ConfigError(f"{checked.name}: {option} is {value!r}; it must be {kind} {bounds}")


def require_choice(checked: SchedulerPassProtocol, option: str, *choices: str) -> None:
    """Raise ConfigError unless this option is one of the choices."""
    if (value := getattr(checked, option)) not in choices:
        raise ConfigError(f"{checked.name}: {option} is {value!r}; it must be {' or '.join(choices)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
