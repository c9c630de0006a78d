"""Configuration files and the cache of the model hub."""

from __future__ import annotations

import os
from pathlib import Path

from sagellm.engines.cli.config import without_passwords
from sagellm.engines.cli.doctor.report import ExaminationContext, Section
from sagellm.engines.config.sources import LoadedConfig, user_config_file


def describe_configuration(loaded: LoadedConfig) -> Section:
    """Say which files were read and which settings differ from their defaults."""
    section = Section("configuration", {"files read": [str(path) for path in loaded.files]})
    section.facts["user's file"] = str(user_config_file(os.environ))
    values = without_passwords(loaded.config).values()
    for key, origin in loaded.origins.items():
        if origin.kind != "default":
            section.facts[key] = f"{values[key]} ({origin})"
    return section


def examine_hub(context: ExaminationContext) -> Section:
    """Examine the folder of downloaded models, and the hub's settings."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    section = Section(
        "hub",
        {
            "cache": str(cache),
            "models in it": len(list(cache.glob("models--*"))),
            "endpoint": constants.ENDPOINT,
            "offline": bool(constants.HF_HUB_OFFLINE),
            "token": Path(constants.HF_TOKEN_PATH).is_file() or "HF_TOKEN" in os.environ,
        },
    )
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        section.warn(
            f"the hub cache {cache} cannot be written to; models cannot be downloaded",
            "set HF_HUB_CACHE to a folder that you may write to",
        )
    return section
