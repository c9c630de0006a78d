"""Which errors say that a setting or an argument is wrong, as opposed to a failure."""

from __future__ import annotations

from sagellm.core import ConfigError, InvalidInputError, UnknownKindError, UnknownProviderError

USAGE_ERRORS = (ConfigError, InvalidInputError, UnknownKindError, UnknownProviderError)
"""They end a command with status 2."""
