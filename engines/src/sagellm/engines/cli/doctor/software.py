"""Python, our packages and their dependencies."""

from __future__ import annotations

import os
import platform
import sys

from sagellm.core.chaos import CHAOS, VARIABLE
from sagellm.engines.cli.doctor.report import ExaminationContext, Section
from sagellm.engines.machine import installed_version

PACKAGES = (
    "sagellm-core-protocols", "sagellm-prefix-cache", "sagellm-kv-pool", "sagellm-eviction-policy",
    "sagellm-scheduler-ir", "sagellm-lifetime-predictor", "sagellm-accel", "sagellm-comm", "sagellm-engines",
)  # fmt: skip
NEEDED = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "pluggy",
    "pydantic",
)
OPTIONAL = {
    "sagellm-server": "serving",
    "sagellm-lab": "measuring and simulating",
    "sagellm-adapters": "running other engines",
    "sagellm-testing": "checking plugins",
    "matplotlib": "plots",
    "triton": "kernels on GPUs",
    "xgrammar": "structured outputs and forced tool calls",
}
"""Library → what needs it."""

OLDEST_PYTHON = (3, 11)


def examine_software(context: ExaminationContext) -> Section:
    """Look at versions, and at what shadows the namespace of the packages."""
    section = Section("software")
    section.facts["python"] = f"{platform.python_version()} ({sys.executable})"
    section.facts["platform"] = platform.platform()
    if sys.version_info < OLDEST_PYTHON:
        section.error(
            f"Python is {platform.python_version()}; sageLLM needs 3.11 or newer",
            "install a newer Python and set up a new environment with it",
        )
    for name in PACKAGES + NEEDED:
        section.facts[name] = found = installed_version(name)
        if found is None:
            section.error(f"{name} is not installed", f"pip install {name}")
    for name, needed_by in OPTIONAL.items():
        section.facts[name] = installed_version(name) or f"not installed (optional, for {needed_by})"
    _check_one_version(section)
    _check_namespace(section)
    _check_chaos(section)
    return section


def _check_one_version(section: Section) -> None:
    """The nine are released together; a mixture has never been tested."""
    found = {section.facts[name] for name in PACKAGES} - {None}
    if len(found) > 1:
        section.warn(
            f"the sageLLM packages have different versions: {', '.join(sorted(found))}",
            f"pip install --upgrade {' '.join(PACKAGES)}",
        )


def _check_namespace(section: Section) -> None:
    """A `sagellm/__init__.py` hides packages, unless it is the one of the distribution `sagellm`."""
    root = sys.modules.get("sagellm")
    shadow = getattr(root, "__file__", None)
    if shadow is not None and "LLM" not in getattr(root, "__all__", ()):
        section.error(
            f"{shadow} hides packages of the sagellm namespace",
            "uninstall the distribution that brought this file (isagellm does)",
        )


def _check_chaos(section: Section) -> None:
    """Warn if fault injection is on, which is for tests only."""
    given = os.environ.get(VARIABLE, "")
    if CHAOS is not None:
        section.warn(
            f"{VARIABLE}={given}: programs started from here fail on purpose, for tests",
            f"unset {VARIABLE}",
        )
    elif given:
        section.warn(f"{VARIABLE}={given!r} is not a seed and does nothing", f"unset {VARIABLE}")
