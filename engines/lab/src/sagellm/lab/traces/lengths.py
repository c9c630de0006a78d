"""Lengths of prompts and outputs: distributions of whole numbers, written as text.

`512`, `uniform:LOW:HIGH`, `normal:MEAN:SD`, `lognormal:MEDIAN:SIGMA`, `exponential:MEAN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from sagellm.core import ConfigError, nearest

_Draw = Callable[[Random, tuple[float, ...]], float]

# name → names of its parameters, and a function that draws a length
_KINDS: dict[str, tuple[tuple[str, ...], _Draw]] = {
    "fixed": (("LENGTH",), lambda rng, given: given[0]),
    "uniform": (("LOW", "HIGH"), lambda rng, given: rng.randint(int(given[0]), int(given[1]))),
    "normal": (("MEAN", "SD"), lambda rng, given: rng.gauss(given[0], given[1])),
    "lognormal": (("MEDIAN", "SIGMA"), lambda rng, given: given[0] * rng.lognormvariate(0, given[1])),
    "exponential": (("MEAN",), lambda rng, given: rng.expovariate(1 / given[0])),
}


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens; every draw is at least 1."""

    kind: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read a distribution. Raises ConfigError."""
        kind, _, rest = text.partition(":")
        if not rest:
            kind, rest = "fixed", text
        if kind not in _KINDS:
            raise ConfigError(
                f"{text!r} names no distribution of lengths; there are {_forms()}.{nearest(kind, _KINDS)}"
            )
        names = _KINDS[kind][0]
        try:
            parameters = tuple(float(part) for part in rest.split(":"))
        except ValueError:
            parameters = ()
        is_senseless = not all(0 <= value < 1e9 for value in parameters) or parameters[:1] == (0.0,)
        if len(parameters) != len(names) or is_senseless or (kind == "uniform" and _is_falling(parameters)):
            raise ConfigError(f"{text!r} is not a distribution of lengths; write {_form(kind)} in tokens")
        return cls(kind, parameters)

    def draw(self, rng: Random) -> int:
        """Draw one length."""
        return max(1, round(_KINDS[self.kind][1](rng, self.parameters)))

    def __str__(self) -> str:
        numbers = ":".join(f"{value:g}" for value in self.parameters)
        return numbers if self.kind == "fixed" else f"{self.kind}:{numbers}"


DEFAULT_INPUT = Lengths("fixed", (512.0,))
DEFAULT_OUTPUT = Lengths("fixed", (128.0,))


def _is_falling(parameters: tuple[float, ...]) -> bool:
    return parameters[0] > parameters[1] or any(value % 1 for value in parameters)


def _form(kind: str) -> str:
    names = _KINDS[kind][0]
    return ":".join(names if kind == "fixed" else (kind, *names))


def _forms() -> str:
    return ", ".join(_form(kind) for kind in _KINDS)
