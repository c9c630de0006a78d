"""The configured model: what it needs, and which forward backends run it."""

from __future__ import annotations

from sagellm.core import SageLLMError
from sagellm.engines.cli.doctor.report import ExaminationContext, Section


def examine_model(context: ExaminationContext) -> Section:
    """Read config and headers of the configured model, if it is on this machine, and ask the backends."""
    from sagellm.engines.forward.choice import refusals
    from sagellm.engines.loading.device_and_dtype import resolve_device
    from sagellm.engines.loading.format_and_family import (
        installed_families,
        installed_formats,
        select_family,
        select_format,
    )
    from sagellm.engines.loading.source import resolve_source
    from sagellm.engines.loading.stored_forms import stored_forms

    settings = context.config.model
    section = Section("model", {"name": settings.name})
    try:
        path = resolve_source(settings.name, revision=settings.revision, offline=True)
        checkpoint = select_format(path, installed_formats(context.registry)).open(path)
        names = frozenset(checkpoint.weights.tensors)
        spec = select_family(checkpoint.config, installed_families(context.registry), names).spec
    except SageLLMError as error:
        section.warn(f"the model {settings.name!r} cannot be examined: {error}", "set another model.name")
        return section
    section.facts["architecture"] = spec.architecture
    section.facts["needs"] = sorted(spec.features)
    section.facts["weights"] = stored_forms(checkpoint.weights)
    for name, reason in refusals(context.registry, spec, resolve_device(settings.device)):
        section.facts[f"forward backend {name}"] = f"not usable: {reason}" if reason else "runs it"
    return section
