"""Draft proposers that need no model: they copy what was said before."""
