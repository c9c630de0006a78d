"""Writing quantized checkpoints, in the format compressed-tensors."""
