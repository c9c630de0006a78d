"""What the commands that load a model share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import ConfigError
from sagellm.engines.cli.output import tell
from sagellm.engines.cli.sampling_flags import SAMPLING_NAMES, check_ranges, read_mapping
from sagellm.engines.cli.status_line import status_line
from sagellm.engines.cli.streams import as_text
from sagellm.engines.config.sources import load_config
from sagellm.engines.embedded import EMBEDDED
from sagellm.engines.head_start import weights_ahead, without_collections
from sagellm.engines.progress import progress_bar

if TYPE_CHECKING:
    from sagellm.engines import LLMEngine, SamplingParams
    from sagellm.engines.config.schema import EngineConfig

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A directory, a GGUF file or a hub id; --model does the same."),
]


def with_model(options: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Store the model argument as the flag would be. Raises ConfigError if both are given."""
    if model is None:
        return options
    if options.setdefault("model", model) != model:
        raise ConfigError(f"two models are named, {model} and --model {options['model']}; name one")
    return options


def read_options(
    options: Mapping[str, Any], config_file: Path | None, **defaults: Any
) -> tuple[EngineConfig, dict[str, Any]]:
    """Split flags into an engine's configuration and sampling settings, overriding `defaults`.

    Both are checked, so that an invalid flag is an error before a model is loaded.
    """
    from sagellm.engines.sampling.params import SamplingParams

    sampling = {**defaults, **{name: value for name, value in options.items() if name in SAMPLING_NAMES}}
    for name in ("stop", "bad_words"):
        if name in sampling:
            sampling[name] = list(map(as_text, sampling[name]))
    if "extra_args" in sampling:
        sampling["extra_args"] = read_mapping("extra_args", sampling["extra_args"])
    check_ranges({name: value for name, value in options.items() if name in SAMPLING_NAMES})
    SamplingParams(**sampling)
    settings = {name: value for name, value in options.items() if name not in SAMPLING_NAMES}
    return load_config(settings, config_file=config_file).config, sampling


def start_engine(config: EngineConfig) -> LLMEngine:
    """Load the model and show progress meanwhile."""
    say_if_embedded(config.model.name)
    with without_collections(), weights_ahead(config):
        with status_line("starting") if sys.stderr.isatty() else progress_bar("starting", total=0):
            from sagellm.engines import LLMEngine
        return LLMEngine(config)


def params_of(engine: LLMEngine, sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the checkpoint's sampling parameters, overridden by flags."""
    return engine.default_params.overridden(**sampling)


def say_if_embedded(model: str) -> None:
    """If no model was named, say which one answers."""
    if model == EMBEDDED:
        tell("using the small embedded model, made for trying things out; --model names another")
