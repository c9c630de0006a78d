"""Checkpoints whose weights were quantized before, read as the codes and scales that they are stored as."""
