"""Plugins: which load, which clash, and whether those that the configuration names are there."""

from __future__ import annotations

from collections import Counter

from sagellm.core import PluginError, UnknownNameError
from sagellm.engines.cli.doctor.report import Patient, Section
from sagellm.engines.config.settings import PROVIDER_KINDS


def examine_plugins(patient: Patient) -> Section:
    """Look at each plugin, then find and import every implementation that the configuration names."""
    registry = patient.registry
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
    values = patient.config.values()
    for key, kind in PROVIDER_KINDS.items():
        named = values[key]
        for name in named if isinstance(named, tuple) else (named,):
            if name is not None:
                _check_provider(section, patient, key, kind, name)
    return section


def _check_provider(section: Section, patient: Patient, key: str, kind: str, name: str) -> None:
    try:
        patient.registry.resolve(kind, name)
    except (UnknownNameError, PluginError) as error:
        section.error(f"{key} is {name!r}: {error}", f"set {key} to an installed one, or install it")
