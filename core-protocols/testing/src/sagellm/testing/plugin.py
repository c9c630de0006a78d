"""What this package offers: the command that checks plugins."""

from sagellm.core import Command, hookimpl


@hookimpl
def sagellm_commands() -> list[Command]:
    """Name this package's commands."""
    return [Command("plugins check", "sagellm.testing.command:app", "Test what a distribution provides.")]
