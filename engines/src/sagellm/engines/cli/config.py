"""`config show`: the settings that an engine would get."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Annotated, Any

import typer

from sagellm.core import ProviderSpec
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.output import new_app, print_json
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.config.sources import LoadedConfig, load_config

_PASSWORD = re.compile(r"(?<=://)[^@/]*:[^@/]*(?=@)")

app = new_app("Show the settings and where they come from.")


@app.command()
@with_flags(ENGINE_FLAGS)
def show(
    *,
    config: ConfigFile = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **settings: Any,
) -> None:
    """Show all settings.

    Flags go over environment variables, these over files, these over defaults. The output is a
    configuration file that `--config` reads; API keys and passwords are left out of it.
    """
    loaded = load_config(settings, config_file=config)
    if loaded.config.server.api_keys:
        typer.echo(f"{len(loaded.config.server.api_keys)} API keys are set; they are not shown", err=True)
        loaded = replace(loaded, config=loaded.config.with_values({"server.api_keys": ()}))
    shown = without_passwords(loaded.config)
    if shown != loaded.config:
        typer.echo("the password in kv.tiers is not shown", err=True)
        loaded = replace(loaded, config=shown)
    if not as_json:
        typer.echo(_as_yaml(loaded, origin=origin))
    elif origin:
        print_json(
            {
                key: {"value": value, "origin": loaded.origins[key].kind, "where": loaded.origins[key].where}
                for key, value in loaded.config.values().items()
            }
        )
    else:
        sections: dict[str, dict[str, Any]] = {}
        for key, value in loaded.config.values().items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        print_json(sections)


def without_passwords(config: EngineConfig) -> EngineConfig:
    """Replace the credentials in URLs of tiers' options by three stars."""
    tiers = tuple(
        ProviderSpec(
            each.name,
            {
                key: _PASSWORD.sub("***", value) if isinstance(value, str) else value
                for key, value in each.options.items()
            },
        )
        for each in config.kv.tiers
    )
    return config.with_values({"kv.tiers": tiers})


def _as_yaml(loaded: LoadedConfig, *, origin: bool) -> str:
    """Write `name: value` lines by section; JSON scalars are YAML, too."""
    entries: list[tuple[str, str]] = []
    section = ""
    for key, value in loaded.config.values().items():
        if not key.startswith(f"{section}."):
            section = key.partition(".")[0]
            entries.append((f"{section}:", ""))
        line = f"  {key.partition('.')[2]}: {json.dumps(value, ensure_ascii=False)}"
        entries.append((line, f"# {loaded.origins[key]}" if origin else ""))
    width = max(len(line) for line, _ in entries)
    return "\n".join(f"{line.ljust(width)}  {comment}".rstrip() for line, comment in entries)
