"""What this package offers: readers of traces, and the commands that measure, replay and simulate."""

from sagellm.core import Command, Provider, hookimpl

_CLI, _TRACES = "sagellm.lab.cli", "sagellm.lab.traces"


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider(
            "trace_reader", "sagellm", f"{_TRACES}.sagellm:SageLLMTraceReader", "sageLLM's own, JSON lines"
        ),
        Provider("trace_reader", "mooncake", f"{_TRACES}.mooncake:MooncakeTraceReader", "Mooncake's lines"),
        Provider("trace_reader", "azure", f"{_TRACES}.azure:AzureTraceReader", "Azure's CSV, lengths only"),
        Provider("trace_reader", "chat", f"{_TRACES}.chat:ChatLogReader", "chat logs with times, JSON lines"),
    ]


@hookimpl
def sagellm_commands() -> list[Command]:
    """Name this package's commands."""
    return [
        Command("bench", f"{_CLI}.bench.command:app", "Measure servers and engines: throughput and latency."),
        Command("benchmark", f"{_CLI}.bench.peers:app", ""),  # what `bench peers` was named in 0.2
        Command("simulate", f"{_CLI}.simulate:app", "Simulate serving a trace, or its prefix cache."),
        Command("ab", f"{_CLI}.ab:app", "Compare configurations on a trace: which is better, how surely."),
        Command("predictor train", f"{_CLI}.predictor:train_app", "Train a lifetime predictor on a trace."),
        Command("predictor score", f"{_CLI}.predictor:score_app", "Score lifetime predictors on a trace."),
        Command("trace", f"{_CLI}.trace:app", "Make traces of load, say what is in one, and convert it."),
    ]
