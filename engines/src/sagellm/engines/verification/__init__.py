"""Compares an engine's greedy tokens with those that transformers' own code of the model would take."""
