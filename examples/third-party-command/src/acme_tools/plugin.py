"""What this package offers."""

from sagellm.core import Command, Provider, hookimpl


@hookimpl
def sagellm_commands() -> list[Command]:
    """Name the commands: the words that users type, where they are, and a line for the help."""
    return [
        Command("blocks", "acme_tools.commands:blocks", "Say how many KV blocks a prompt takes."),
        Command("plugins count", "acme_tools.commands:count", "Count the providers of each kind."),
    ]


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name the pass."""
    return [
        Provider(
            "scheduler_pass", "newest-first", "acme_tools.newest_first:NewestFirst", "the last comes first"
        )
    ]
