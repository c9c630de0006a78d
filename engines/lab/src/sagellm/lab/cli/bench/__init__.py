"""`bench`: the commands, their flags, and how they print."""
