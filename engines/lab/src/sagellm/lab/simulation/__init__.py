"""Runs recorded load through the serving code, without a model."""
