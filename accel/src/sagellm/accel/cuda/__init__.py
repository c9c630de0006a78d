"""The forward pass on a CUDA device, in Triton kernels. Importing a module of kernels needs triton."""
