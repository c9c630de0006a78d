"""Opens a trace, compressed or not, with the reader that knows its format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from sagellm.core import (
    ConfigError,
    InvalidInputError,
    PluginError,
    PluginRegistry,
    ProviderSpec,
    Tokenize,
    TraceReaderProtocol,
    TraceRequest,
    call_plugin,
    get_logger,
)
from sagellm.lab.files import PackingError, open_text, plain_name

logger = get_logger(__name__)

_MAX_SPAN_S = 1e9
"""Clocks count in nanoseconds of 64 bits."""


def read_trace(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    limit: int | None = None,
    tokenize: Tokenize | None = None,
) -> list[TraceRequest]:
    """Read the first `limit` requests, ordered by arrival, on a clock that starts with the first.

    Requests without a prompt or an output are left out. Without a name, the reader is chosen by the file.
    Raises ConfigError for a file that does not exist or that no reader knows, and UnknownProviderError for an
    unknown reader's name.
    """
    path = Path(path)
    try:
        with open_text(path) as file:
            first_line = file.readline()
            file.seek(0)
            chosen = _choose(path, first_line, name, tokenize)
            usable = (one for one in chosen.read(file) if one.num_prompt_tokens and one.num_output_tokens)
            found = sorted(islice(usable, limit), key=lambda one: one.arrival_s)
    except (OSError, EOFError, PackingError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read") from error
    except InvalidInputError as error:
        raise ConfigError(f"the trace {path}: {error}") from error
    if not found:
        raise ConfigError(f"the trace {path} holds no request with a prompt and an output")
    if (span_s := found[-1].arrival_s - found[0].arrival_s) > _MAX_SPAN_S:
        raise ConfigError(
            f"the trace {path}: its arrivals span {span_s:.3g} s; at most {_MAX_SPAN_S:.0e} are possible"
        )
    return list(_from_zero(found))


def _from_zero(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    start_s = requests[0].arrival_s
    return (replace(one, arrival_s=one.arrival_s - start_s) for one in requests)


def _choose(path: Path, first_line: str, name: str | None, tokenize: Tokenize | None) -> TraceReaderProtocol:
    registry = PluginRegistry.load()

    def make(reader: str | ProviderSpec) -> TraceReaderProtocol:
        made: TraceReaderProtocol = registry.make("trace_reader", reader, tokenize=tokenize)
        return made

    if name is not None:
        return make(ProviderSpec.of(name))
    names = [entry.qualified_name for entry in registry.providers("trace_reader")]
    for each in names:
        try:
            reader = make(each)
            if call_plugin(each, "can_read()", reader.can_read, plain_name(path), first_line):
                return reader
        except PluginError as error:
            logger.warning("a trace reader is left out: %s", error)
    raise ConfigError(f"no trace reader knows the format of {path}; there are {', '.join(names)}")
