"""Where settings come from: flag > environment > file > default, and the origin of each.

Files, the strongest first: the one named by `--config`, `sagellm.yaml` in the working directory,
`config.yaml` in the user's configuration folder. All that exist are read; each states only what it changes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

from sagellm.core import ConfigError, nearest
from sagellm.core.plugins.option_text import BOOLEANS
from sagellm.engines.config.explain import kind_of, with_flat_name
from sagellm.engines.config.schema import PROVIDER_KINDS, SECTIONS, EngineConfig, field_of, flat_to_dotted
from sagellm.engines.config.settings import ALL_NAMES, flag_of
from sagellm.engines.config.shown import shown

PREFIX = "SAGELLM_"
_OF_PLUGINS = frozenset({"SAGELLM_PLUGINS_ALLOW", "SAGELLM_PLUGINS_DENY", "SAGELLM_TRACE_HOOKS"})
"""Variables that the plugin registry reads; not settings, although one begins like a section."""
API_KEY_VARIABLE = "SAGELLM_API_KEY"
"""Short for `SAGELLM_SERVER__API_KEYS`, which overrides it; its text is never parsed as YAML."""
DIRECTORY_FILE = "sagellm.yaml"
_NULLS = ("null", "none", "~")


@dataclass(frozen=True)
class Origin:
    """What gave a setting its value: `where` is a flag, a variable or a path, "" for a default."""

    kind: Literal["flag", "environment", "file", "default"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, the origin of each value by dotted key, and the files that were read."""

    config: EngineConfig
    origins: Mapping[str, Origin]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class _Layer:
    origin: Origin
    values: Mapping[str, Any]


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> LoadedConfig:
    """Read all sources and merge them.

    `flags` maps flat names to what was given on the command line; text is converted. `environ`
    and `directory` default to the process's own. Raises ConfigError with a line for every invalid value,
    naming its origin; an invalid value is an error even if a stronger source overrides it.
    """
    environ = os.environ if environ is None else environ
    files = tuple(_existing_files(config_file, environ, directory or Path()))
    layers = [_file_layer(path) for path in files]
    layers += _environment_layers(environ)
    layers += _flag_layers(flags or {})
    values: dict[str, Any] = {}
    origins = dict.fromkeys(EngineConfig().values(), Origin("default"))
    for layer in _checked(layers):
        values.update(layer.values)
        origins.update(dict.fromkeys(layer.values, layer.origin))
    return LoadedConfig(EngineConfig.from_values(values), origins, files)


def user_config_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's configuration file by the platform's convention."""
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    if sys.platform == "win32":
        base = Path(environ.get("APPDATA") or home / "AppData" / "Roaming")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        base = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    return base / "sagellm" / "config.yaml"


def _existing_files(named: Path | None, environ: Mapping[str, str], directory: Path) -> Iterator[Path]:
    """Yield the weakest first."""
    if named is not None and not named.is_file():
        raise ConfigError(f"--config is {str(named)!r}; there is no such file")
    for path in (user_config_file(environ), directory / DIRECTORY_FILE):
        if path.is_file():
            yield path
    if named is not None:
        yield named


def _file_layer(path: Path) -> _Layer:
    from sagellm.engines.config.bounded_yaml import MAX_BYTES, YAMLSyntaxError, parse_yaml

    try:
        with open(path, "rb") as file:
            content = parse_yaml(file.read(MAX_BYTES + 1).decode("utf-8"))
    except YAMLSyntaxError as error:
        raise ConfigError(f"the configuration file {path} is not YAML: {error}") from error
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    values: dict[str, Any] = {}
    for section, settings in _mapping(content, f"the configuration file {path}").items():
        given = _mapping(settings, f"{section} in {path}", section)
        for name, value in given.items():
            values[f"{section}.{name}"] = value
        if not settings and section not in SECTIONS:
            values[f"{section}."] = None  # an empty section may be misspelt, too
    return _Layer(Origin("file", str(path)), values)


def _mapping(value: Any, what: str, flat_name: str = "") -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        section, _, name = ALL_NAMES.get(flat_name, "kv.block_size").partition(".")
        example = f"{section}: {{{name}: {value if flat_name in ALL_NAMES and len(str(value)) < 80 else 16}}}"
        raise ConfigError(f"{what} is {shown(value)}; it must be a mapping, such as `{example}`")
    return {str(key): item for key, item in value.items()}


def _environment_layers(environ: Mapping[str, str]) -> Iterator[_Layer]:
    """Yield one layer per variable `SAGELLM_SECTION__NAME`; an empty variable counts as not set."""
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or not text or variable in _OF_PLUGINS:
            continue
        if variable == API_KEY_VARIABLE:
            if not text.strip(", \t\r\n"):  # else a secret left empty would open the server
                raise ConfigError(f"{variable} is set and has no key; put one in, or unset it")
            yield _Layer(Origin("environment", variable), {"server.api_keys": text})
            continue
        section, separator, name = variable.removeprefix(PREFIX).lower().partition("__")
        key = f"{section}.{name}"
        if separator and section in SECTIONS and name in SECTIONS[section].model_fields:
            yield _Layer(Origin("environment", variable), {key: _parsed(key, text)})
        elif separator or _looks_like_a_setting(section):
            raise ConfigError(
                f"the environment variable {variable} names no setting; settings are "
                f"{PREFIX}SECTION__NAME, the sections {', '.join(SECTIONS)}.{_nearest_variable(variable)}"
            )


def _looks_like_a_setting(name: str) -> bool:
    """Say whether someone meant a setting: by its flag, or with one underscore instead of two."""
    return name in ALL_NAMES or any(name == section or name.startswith(f"{section}_") for section in SECTIONS)


def _nearest_variable(variable: str) -> str:
    key = ALL_NAMES.get(variable.removeprefix(PREFIX).lower())
    if key is not None:
        return f" Did you mean {_variable(key)!r}?"
    return nearest(variable, [_variable(key) for key in EngineConfig().values()])


def _variable(key: str) -> str:
    return PREFIX + key.replace(".", "__").upper()


def _flag_layers(flags: Mapping[str, Any]) -> Iterator[_Layer]:
    for name, key in zip(flags, flat_to_dotted(flags, ALL_NAMES), strict=True):
        value = flags[name]
        parsed = _parsed(key, value) if isinstance(value, str) else value
        yield _Layer(Origin("flag", flag_of(name)), {key: parsed})


def _parsed(key: str, text: str) -> Any:
    """Turn text into the type of a setting: names of providers stay text, lists of others are YAML.

    Text that does not fit is returned as it is, so that the schema refuses it in its own words. Raises
    ConfigError for YAML that exceeds a limit (`bounded_yaml`).
    """
    kind, optional = kind_of(field_of(key))
    word = text.strip().lower()
    if optional and word in _NULLS:
        return None
    if kind is bool:
        return (BOOLEANS | {"1": True, "0": False}).get(word, text)
    if get_origin(kind) is tuple and key not in PROVIDER_KINDS:
        return _parsed_list(key, text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def _parsed_list(key: str, text: str) -> Any:
    from sagellm.engines.config.bounded_yaml import YAMLSyntaxError, parse_yaml

    try:
        return parse_yaml(text)
    except YAMLSyntaxError:
        return text
    except ConfigError as error:
        raise ConfigError(f"{with_flat_name(key)} cannot be read: {error}") from error


def _checked(layers: list[_Layer]) -> list[_Layer]:
    """Return the layers with values as the schema reads them, each validated on its own.

    Raises ConfigError, which says of every invalid value where it comes from.
    """
    checked: list[_Layer] = []
    wrong: list[str] = []
    for layer in layers:
        try:
            checked.append(_Layer(layer.origin, EngineConfig.from_values(layer.values).given_values()))
        except ConfigError as error:
            wrong += [f"{line} (from {layer.origin.where})" for line in str(error).splitlines()]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return checked
