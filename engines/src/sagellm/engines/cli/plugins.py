"""`plugins list|info`: what is installed, and what is broken. sagellm-testing adds `plugins check`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sagellm.core import SAGELLM_API, PluginError, PluginRegistry, UnknownProviderError, nearest
from sagellm.core.plugins.options import ProviderOption
from sagellm.core.plugins.registry import InstalledCommand, InstalledPlugin, InstalledProvider
from sagellm.engines.cli.names import complete_kind, complete_plugin
from sagellm.engines.cli.output import columns, new_app, print_json
from sagellm.engines.config.schema import SETTINGS
from sagellm.engines.config.settings import ALL_NAMES, flag_of

CORE = "sagellm-core-protocols"


class _Group(TyperGroup):
    """Says where a command of another distribution comes from."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "check" and "check" not in self.commands:
            ctx.fail("No such command 'check'. It comes with sagellm-testing: pip install sagellm-testing")
        return super().resolve_command(ctx, args)


app = new_app("List installed plugins, describe one, or test it.", _Group)


@dataclass(frozen=True, kw_only=True)
class ProviderInfo:
    """Everything known about one provider. `error` says why its target does not import."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    summary: str
    core: str  # the versions of core that the distribution requires
    core_installed: str
    api: int  # the protocol version for which it was written
    api_installed: int
    is_automatic: bool = True  # False: settings such as `forward.backend: auto` leave it out
    recommended_for: str = ""  # by the measurements that `measured` sums up
    measured: str = ""
    description: str = ""  # first line of the target's docstring
    options: tuple[ProviderOption, ...] = ()
    error: str | None = None


@app.command("list")
def list_plugins(
    *,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Only providers of this kind.", autocompletion=complete_kind),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List providers, and broken plugins."""
    registry = PluginRegistry.load()
    providers = registry.providers(kind)
    if as_json:
        print_json(
            {
                "plugins": [_plugin_entry(plugin) for plugin in registry.plugins],
                "providers": [_provider_entry(entry) for entry in providers],
                "commands": [_command_entry(each) for each in registry.commands()],
            }
        )
        return
    rows = [
        (entry.provider.kind, entry.provider.name, entry.distribution, entry.version, entry.provider.summary)
        for entry in providers
    ]
    if kind is None:
        rows += [
            ("command", each.command.name, each.distribution, each.version, each.command.summary)
            for each in registry.commands()
        ]
    typer.echo(columns(("KIND", "NAME", "DISTRIBUTION", "VERSION", "SUMMARY"), rows))
    broken = [plugin for plugin in registry.plugins if plugin.error is not None]
    if broken:
        typer.echo("\nWith an error, which stops only what uses them:")
    for plugin in broken:
        typer.echo(f"  {plugin.distribution} {plugin.version}: {plugin.error}")


@app.command()
def info(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Provider (lru, DISTRIBUTION:lru), command or distribution.",
            autocompletion=complete_plugin,
        ),
    ],
    *,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Only the provider of this kind.", autocompletion=complete_kind),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell about one provider, command or distribution."""
    registry = PluginRegistry.load()
    broken = [plugin for plugin in registry.plugins if plugin.error and plugin.distribution == name]
    entries = [
        entry
        for entry in registry.providers(kind)
        if name in (entry.provider.name, entry.qualified_name, entry.distribution)
    ]
    commands = [
        each
        for each in registry.commands()
        if kind is None and name in (each.command.name, each.distribution)
    ]
    if not entries and not broken and not commands:
        raise _unknown(registry, name, kind)
    infos = [_info(registry, entry) for entry in entries]
    if as_json:
        print_json(
            {
                "plugins": [_plugin_entry(plugin) for plugin in broken],
                "providers": infos,
                "commands": [_command_entry(each) for each in commands],
            }
        )
        return
    blocks = [_plugin_text(plugin) for plugin in broken] + [_provider_text(entry) for entry in infos]
    typer.echo("\n\n".join(blocks + [_command_text(each) for each in commands]))


def _unknown(registry: PluginRegistry, name: str, kind: str | None) -> UnknownProviderError:
    entries = registry.providers(kind)
    known = sorted({entry.provider.name for entry in entries} | {entry.distribution for entry in entries})
    commands = [] if kind else registry.commands()
    hint = nearest(name, [*known, *(each.command.name for each in commands)])
    known += sorted({each.distribution for each in commands} - set(known))
    what = f"{kind} or distribution" if kind else "provider, command or distribution"
    return UnknownProviderError(
        f"no installed {what} is called {name!r}; installed: {', '.join(known) or 'none'}.{hint}"
    )


def _plugin_entry(plugin: InstalledPlugin) -> dict[str, str | None]:
    return {
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
        "error": None if plugin.error is None else str(plugin.error),
    }


def _provider_entry(entry: InstalledProvider) -> dict[str, str]:
    return {**entry.provider._asdict(), "distribution": entry.distribution, "version": entry.version}


def _command_entry(each: InstalledCommand) -> dict[str, str]:
    return {**each.command._asdict(), "distribution": each.distribution, "version": each.version}


def _info(registry: PluginRegistry, entry: InstalledProvider) -> ProviderInfo:
    description, error, options = "", None, tuple[ProviderOption, ...]()
    try:
        chosen = registry.choose(entry.provider.kind, entry.qualified_name)
        description = next(iter((chosen.factory.__doc__ or "").strip().splitlines()), "")
        options = chosen.options() if _takes_options(entry.provider.kind) else ()
    except PluginError as problem:
        error = str(problem)
    return ProviderInfo(
        **entry.provider._asdict(),
        distribution=entry.distribution,
        version=entry.version,
        core=core_range(entry.distribution),
        core_installed=version(CORE),
        api=_api(registry, entry.distribution),
        api_installed=SAGELLM_API,
        description=description,
        options=options,
        error=error,
    )


def core_range(distribution: str) -> str:
    """Return the versions of core that a distribution requires: `<0.3,>=0.2`, or "" if it states none."""
    if distribution == CORE:
        return ""
    try:
        stated = requires(distribution) or []
    except PackageNotFoundError:
        return ""
    wanted = [line.split(";")[0].strip() for line in stated if line.startswith(CORE)]
    return wanted[0].removeprefix(CORE).strip() if wanted else ""


def _api(registry: PluginRegistry, distribution: str) -> int:
    modules = [plugin.entry_point for plugin in registry.plugins if plugin.distribution == distribution]
    return max((getattr(sys.modules.get(name), "SAGELLM_API", 0) for name in modules), default=0)


def _plugin_text(plugin: InstalledPlugin) -> str:
    lines = [
        f"{plugin.distribution} {plugin.version} has an error",
        f"  entry point   {plugin.entry_point}",
        f"  error         {plugin.error}",
    ]
    return "\n".join(lines)


def _command_text(each: InstalledCommand) -> str:
    lines = [
        f"command {each.command.name}: {each.command.summary}",
        f"  distribution  {each.distribution} {each.version}",
        f"  target        {each.command.target}",
    ]
    return "\n".join(lines)


def _provider_text(entry: ProviderInfo) -> str:
    asked = f"core {entry.core} asked for, " if entry.core else ""
    lines = [
        f"{entry.kind} {entry.name}: {entry.summary}",
        f"  distribution  {entry.distribution} {entry.version}",
        f"  target        {entry.target}",
        f"  compatible    {asked}core {entry.core_installed} installed; "
        f"protocol version {entry.api}, core has {entry.api_installed}",
        f"  error         {entry.error}" if entry.error else f"  description   {entry.description}",
    ]
    for name, text in (
        ("recommended", entry.recommended_for and f"for {entry.recommended_for}"),
        ("measured", entry.measured),
    ):
        if text:
            lines.append(f"  {name:<12}  {text}")
    if not entry.is_automatic:
        lines.append("  automatic     no: a setting has to name it")
    if entry.options:
        lines += ["", columns(("  OPTION", "TYPE", "DEFAULT"), [_option_row(each) for each in entry.options])]
        if flag := _flag_of(entry.kind):
            first = entry.options[0].name.strip("*")
            lines += ["", f"  as in {flag} '{entry.name}{{{first}=…}}'"]
    return "\n".join(lines)


def _takes_options(kind: str) -> bool:
    """Say whether a setting or `--reader` names providers of a kind; others keep their defaults."""
    return kind in SETTINGS or kind == "trace_reader"


def _flag_of(kind: str) -> str:
    """Return the flag of the setting that names providers of a kind, or ""."""
    return next((flag_of(name) for name, key in ALL_NAMES.items() if key == SETTINGS.get(kind)), "")


def _option_row(option: ProviderOption) -> tuple[str, str, str]:
    default = "required" if option.is_required else "-" if option.name[0] == "*" else repr(option.default)
    return f"  {option.name}", option.type, default
