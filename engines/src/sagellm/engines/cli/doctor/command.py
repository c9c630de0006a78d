"""`doctor`: what was found here, what is wrong, and how to fix it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sagellm.core import ConfigError, PluginRegistry, SageLLMError, Topology
from sagellm.engines.cli.doctor.files import describe_configuration, examine_hub
from sagellm.engines.cli.doctor.hardware import (
    examine_cpu,
    examine_devices,
    examine_memory,
    examine_native,
    examine_products,
    examine_threads,
)
from sagellm.engines.cli.doctor.model import examine_model
from sagellm.engines.cli.doctor.plugins import examine_plugins
from sagellm.engines.cli.doctor.report import Examination, ExaminationContext, Section, as_text, examine
from sagellm.engines.cli.doctor.software import examine_software
from sagellm.engines.cli.engine_flags import ConfigFile
from sagellm.engines.cli.output import print_json
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.config.sources import load_config
from sagellm.engines.machine import read_topology

EXAMINATIONS: tuple[Examination, ...] = (
    examine_software,
    examine_devices,
    examine_cpu,
    examine_threads,
    examine_native,
    examine_products,
    examine_memory,
    examine_plugins,
    examine_model,
    examine_hub,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def doctor(
    *,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what was found here, what is wrong and how to fix it. Exit code 1 if something is broken."""
    sections = diagnose(config)
    is_broken = any(problem.severity == "error" for section in sections for problem in section.problems)
    if as_json:
        print_json({"healthy": not is_broken, "sections": [asdict(section) for section in sections]})
    else:
        typer.echo(as_text(sections))
    if is_broken:
        raise typer.Exit(1)


def diagnose(config_file: Path | None = None) -> list[Section]:
    """Run all examinations. A configuration that cannot be used is a finding, too."""
    configuration, settings = _examine_configuration(config_file)
    registry = PluginRegistry.load()
    context = ExaminationContext(registry=registry, config=settings, topology=_topology(registry, settings))
    return [*(examine(examination, context) for examination in EXAMINATIONS), configuration]


def _examine_configuration(config_file: Path | None) -> tuple[Section, EngineConfig]:
    try:
        loaded = load_config(config_file=config_file)
    except ConfigError as error:
        section = Section("configuration")
        section.error(str(error), "correct it; `sage config show --origin` shows all settings")
        return section, EngineConfig()
    return describe_configuration(loaded), loaded.config


def _topology(registry: PluginRegistry, settings: EngineConfig) -> Topology | None:
    try:
        return read_topology(registry, settings.comm.topology)[0]
    except SageLLMError:
        return None
