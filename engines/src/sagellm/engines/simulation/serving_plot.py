"""Draws simulated runs: how long requests waited for their first token, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path

from sagellm.core import ConfigError
from sagellm.engines.simulation.served_load import ServedRequest
from sagellm.engines.whole_file import whole_file


def plot_serving(path: Path, runs: Mapping[str, Seq[ServedRequest]]) -> None:
    """Write a picture in the format of the file's extension. Raises ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    shares, times = figure.subplots(1, 2)
    for name, served in runs.items():
        done = [one for one in served if one.first_token_ns is not None]
        arrivals = [one.arrival_ns / 1e9 for one in done]
        ttfts = [((one.first_token_ns or 0) - one.arrival_ns) / 1e9 for one in done]
        shares.plot(sorted(ttfts), [100 * (n + 1) / len(ttfts) for n in range(len(ttfts))], label=name)
        times.plot(arrivals, ttfts, ".", markersize=2, label=name)
    shares.set(xlabel="time to first token (s)", ylabel="requests (%)", xscale="log", ylim=(0, 100))
    times.set(xlabel="arrival (s)", ylabel="time to first token (s)", yscale="log")
    shares.legend(fontsize="small")
    try:
        with whole_file(path) as file:
            figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}") from error
