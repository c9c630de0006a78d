"""Commands that measure, replay and simulate."""
