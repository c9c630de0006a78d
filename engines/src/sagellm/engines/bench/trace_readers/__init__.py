"""Reads recorded load: when requests came, and how long prompt and output were. One format a file."""
