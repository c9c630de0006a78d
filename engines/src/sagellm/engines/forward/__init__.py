"""Running a step's forward pass."""
