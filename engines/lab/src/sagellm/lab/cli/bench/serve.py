"""`bench serve`: measures any OpenAI-compatible server."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING, Any, get_args

from sagellm.core import ConfigError, nearest
from sagellm.lab.bench.settings import Endpoint, LoadSettings, PromptForm
from sagellm.lab.cli.bench.flags import SERVE_FLAGS, parse_goodput
from sagellm.lab.cli.bench.measurement import REQUEST_FLAGS, measurement
from sagellm.lab.traces.lengths import Lengths

if TYPE_CHECKING:
    from sagellm.lab.bench.results import Result


def _serve(options: dict[str, Any]) -> Result:
    """Put load on an OpenAI-compatible server of any make, and measure its streamed answers.

    TTFT counts from a request's arrival to the first bytes with something visible, TPOT the time
    after them by further token, as the server counts tokens.
    """
    from sagellm.lab.bench.results import make_result, request_rows
    from sagellm.lab.bench.serve import run_serve

    settings = load_settings(options)
    measured = run_serve(settings, progress=True)
    return make_result(
        "serve",
        settings.shown() | {"model": measured.model},
        measured.figures,
        client=measured.client,
        server=measured.server,
        warnings=measured.warnings,
    ) | {"requests": request_rows(measured.run)}


app = measurement(_serve, REQUEST_FLAGS, SERVE_FLAGS)


def load_settings(options: dict[str, Any]) -> LoadSettings:
    """Read what arrives as text. Raises ConfigError."""
    read: dict[str, Any] = {
        "input_len": Lengths.parse,
        "output_len": Lengths.parse,
        "goodput": parse_goodput,
        "rate": lambda value: None if value == inf else value,
        "extra_body": _parse_object,
        "endpoint": lambda value: _choice("--endpoint", value, get_args(Endpoint)),
        "prompt_form": lambda value: _choice("--prompt-form", value, get_args(PromptForm)),
    }
    return LoadSettings(
        **{name: read[name](value) if name in read else value for name, value in options.items()}
    )


def _choice(flag: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{flag} is {value!r}; it must be {' or '.join(choices)}.{nearest(value, choices)}")
    return value


def _parse_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-body is {text!r}; it must be a JSON object")
    return found
