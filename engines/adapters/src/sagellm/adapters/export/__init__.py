"""Settings of ours as the command lines of other engines."""
