"""Commands and a scheduler pass from outside."""
