"""Commands that serve, and that ask a running engine."""
