"""What this package offers: the commands that serve, and that ask a running engine."""

from sagellm.core import Command, hookimpl

_CLI = "sagellm.server.cli"
_MODULES = {
    "eviction": "eviction policy",
    "tiers": "KV tiers",
    "speculation": "drafts",
    "grammar": "structured outputs",
    "predictor": "lifetime predictor",
    "accel": "quantizer",
    "sparsity": "sparsifier",
    "comm": "topology",
}


@hookimpl
def sagellm_commands() -> list[Command]:
    """Name this package's commands."""
    return [
        Command("serve", f"{_CLI}.serve:app", "Serve a model over HTTP, as the OpenAI API."),
        Command("engine", f"{_CLI}.engine.app:app", "Start, show and stop engines."),
        Command("explain", f"{_CLI}.explain:app", "Say what a running engine's scheduler decided, and why."),
        Command("scheduler", f"{_CLI}.scheduler:app", "Watch the scheduler of a running engine."),
        Command(
            "policy", f"{_CLI}.policy:app", "List policies, and show and switch those of a running engine."
        ),
        Command("cache", f"{_CLI}.cache:app", "Watch and change the prefix cache of a running engine."),
        Command("pool", f"{_CLI}.pool:app", "Watch and compact the KV pool of a running engine."),
        *(
            Command(name, f"{_CLI}.stats:{name}", f"Watch the {what} of a running engine.")
            for name, what in _MODULES.items()
        ),
    ]
