"""`adapter list|show`: settings of ours as other engines' command lines."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sagellm.core import ConfigError, EngineAdapterProtocol, PluginRegistry, ProviderSpec
from sagellm.engines.cli.engine_flags import ENGINE_FLAGS, ConfigFile
from sagellm.engines.cli.flags import with_flags
from sagellm.engines.cli.names import complete_providers
from sagellm.engines.cli.output import columns, new_app, print_json
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.config.sources import LoadedConfig, load_config
from sagellm.engines.sizes import parse_bytes

_KIND = "engine_adapter"
_MODEL = "model.name"

app = new_app("Run other engines with settings of ours.")

AdapterName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Adapter by name.", autocompletion=complete_providers(_KIND)),
]


@app.command("list")
def list_adapters(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the engines, and the settings that each of them has."""
    registry = PluginRegistry.load()
    adapters: dict[str, EngineAdapterProtocol] = {
        entry.provider.name: registry.make(_KIND, entry.qualified_name)
        for entry in registry.providers(_KIND)
        if entry.provider.name != "null"
    }
    if as_json:
        print_json(
            {
                name: {"engine": each.engine, "knobs": each.knobs(), "refusals": each.refusals()}
                for name, each in adapters.items()
            }
        )
        return
    if not adapters:
        typer.echo("no adapter is installed: pip install sagellm-adapters", err=True)
        raise typer.Exit(1)
    rows = [
        (name, each.engine, key, theirs)
        for name, each in adapters.items()
        for key, theirs in each.knobs().items()
    ]
    typer.echo(columns(("NAME", "ENGINE", "SETTING", "THERE"), rows))


@app.command()
@with_flags(ENGINE_FLAGS)
def show(
    name: AdapterName,
    *,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **settings: Any,
) -> None:
    """Show the command that serves a model in another engine with the settings that are set.

    Those that keep our defaults are left to that engine. One that it does not have is an error.
    """
    loaded = load_config(settings, config_file=config)
    adapter: EngineAdapterProtocol = PluginRegistry.load().make(_KIND, name)
    given = set_values(loaded)
    model = given.pop(_MODEL, None)
    if model is None:
        raise ConfigError(f"{_MODEL} is not set, and {adapter.engine} has no model of its own; give --model")
    command = adapter.export(str(model), given)
    if as_json:
        print_json({"arguments": command.arguments, "environment": dict(command.environment)})
    else:
        typer.echo(command.text)


def set_values(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the settings that somebody has set, by key, in plain values; sizes in bytes."""
    defaults, found = EngineConfig().values(), dict[str, Any]()
    for key, value in loaded.config.values().items():
        # What is named in another setting, as in `scheduler.passes: order=…`, has no origin of its own.
        if value != defaults[key] or loaded.origins[key].kind != "default":
            found[key] = value
    if "kv.tiers" in found:
        found["kv.tiers"] = [_in_bytes(each) for each in found["kv.tiers"]]
    return {key: value for key, value in found.items() if value not in (None, ())}


def _in_bytes(tier: Any) -> dict[str, Any]:
    spec = ProviderSpec.of(tier)
    sizes = {key: parse_bytes(spec.options[key], key) for key in ("max_bytes",) if key in spec.options}
    return {"name": spec.name, "options": {**spec.options, **sizes}}
