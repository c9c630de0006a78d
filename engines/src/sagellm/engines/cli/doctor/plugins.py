"""Plugins: which load, which clash, and whether those that the configuration names are there."""

from __future__ import annotations

from collections import Counter

from sagellm.core import PluginError, UnknownNameError
from sagellm.engines.cli.doctor.report import ExaminationContext, Section
from sagellm.engines.config.settings import named_providers


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
    for key, kind, name in named_providers(context.config.values()):
        try:
            registry.resolve(kind, name)
        except (UnknownNameError, PluginError) as error:
            section.error(f"{key} is {name!r}: {error}", f"set {key} to an installed one, or install it")
    return section
