"""What a checkpoint says about how its weights were quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core import CheckpointError, HFConfig, UnsupportedModelError
from sagellm.engines.config.shown import shown
from sagellm.engines.loading.checkpoint import CONFIG
from sagellm.engines.loading.json_file import read_optional_json
from sagellm.engines.models.quantized_weights import ENTRIES, entry_in_config

SETTINGS_FILES = {
    "quantize_config.json": "gptq",
    "quantization_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Where older exporters wrote it → the method, if the file does not name one."""


@dataclass(frozen=True)
class QuantizationSettings:
    """The entries of one `quantization_config`, each checked when it is asked for."""

    path: Path  # of the file that has them
    method: str
    entries: Mapping[str, Any]
    where: str = "quantization_config"

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first entry of these names that is not null."""
        found = (self.entries[name] for name in names if self.entries.get(name) is not None)
        return next(found, default)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return a whole number. Raises CheckpointError, also for one that is missing and has no default."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(names[0], value, "a whole number")
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """Return a bool. Raises CheckpointError."""
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise self.error(names[0], value, "true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        """Return a text in lower case. Raises CheckpointError."""
        value = self.get(*names, default=default)
        if not isinstance(value, str):
            raise self.error(names[0], value, "a text")
        return value.lower()

    def names(self, *names: str) -> tuple[str, ...]:
        """Return a list of texts. Raises CheckpointError."""
        value = self.get(*names, default=[])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(names[0], value, "a list of names")
        return tuple(value)

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block, None if there is none. Raises CheckpointError."""
        value = self.get(name)
        if value is None:
            return None
        sizes = value.split("x") if isinstance(value, str) else value
        if isinstance(sizes, list) and all(type(size) is int or _is_digits(size) for size in sizes):
            numbers = [int(size) for size in sizes]
            if len(numbers) == 2 and min(numbers) > 0:
                return numbers[0], numbers[1]
        raise self.error(name, value, "two sizes, of rows and columns")

    def nested(self, name: str) -> QuantizationSettings | None:
        """Return an entry that is an object, None if there is none. Raises CheckpointError."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object")
        return QuantizationSettings(self.path, self.method, value, f"{self.where}.{name}")

    def error(self, name: str, value: object, expected: str) -> CheckpointError:
        """Return the error for an entry that makes no sense."""
        return CheckpointError(f"{self.path}: {self.where}.{name} is {shown(value)}; it must be {expected}")

    def refusal(self, what: str, readable: str) -> UnsupportedModelError:
        """Return the error for valid settings that are not supported; `readable` says which are."""
        return UnsupportedModelError(
            f"{self.path}: the weights are quantized as {self.method} with {what}, which is not read; "
            f"{readable}"
        )


def _is_digits(value: object) -> bool:
    return isinstance(value, str) and value.isdecimal() and len(value) < 10


def read_settings(path: Path) -> QuantizationSettings | None:
    """Return what the directory of a checkpoint says, None if it says nothing. Raises CheckpointError."""
    entries = entry_in_config(read_optional_json(path / CONFIG))
    if isinstance(entries, Mapping):
        return QuantizationSettings(path / CONFIG, str(entries.get("quant_method", "")), entries)
    for name, method in SETTINGS_FILES.items() if entries is None else ():
        if written := read_optional_json(path / name):
            return QuantizationSettings(path / name, str(written.get("quant_method", method)), written)
    return None


def without_settings(config: HFConfig) -> HFConfig:
    """Return a config that describes the dequantized model, which families read."""
    nested = config.get("text_config")
    left = {key: value for key, value in config.items() if key not in ENTRIES}
    return left | {"text_config": without_settings(nested)} if isinstance(nested, Mapping) else left
