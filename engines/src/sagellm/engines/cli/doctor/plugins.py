"""Plugins: which load, which clash, and whether those named by the configuration are installed."""

from __future__ import annotations

from collections import Counter

from sagellm.core import ConfigError, PluginError, UnknownNameError
from sagellm.engines.cli.doctor.report import ExaminationContext, Section


def examine_plugins(context: ExaminationContext) -> Section:
    """Look at each plugin, then find and import every implementation that the configuration names."""
    registry = context.registry
    counts = Counter(entry.distribution for entry in registry.providers())
    section = Section("plugins")
    for plugin in registry.plugins:
        state = "broken" if plugin.error else f"{counts[plugin.distribution]} provider(s)"
        section.facts[plugin.distribution] = f"{plugin.version}, {state}"
        if plugin.error is not None:
            section.error(
                str(plugin.error),
                f"repair it or remove it (pip uninstall {plugin.distribution}), or start with "
                f"SAGELLM_PLUGINS_DENY={plugin.distribution}",
            )
    for key, kind, spec in context.config.providers():
        try:
            chosen = registry.choose(kind, spec)
            chosen.check()
        except (UnknownNameError, PluginError) as error:
            section.error(f"{key} is {spec.name!r}: {error}", f"set {key} to an installed one, or install it")
        except ConfigError as error:
            section.error(f"{key}: {error}", f"see `sage llm plugins info {spec.name} --kind {kind}`")
        else:
            if options := chosen.described():
                section.facts[f"{key} {spec.name}"] = options
    return section
