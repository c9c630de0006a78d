"""The protocols that plugins implement, one module each."""
