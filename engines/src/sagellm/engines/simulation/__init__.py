"""Runs recorded load through the code that serves, without a model."""
