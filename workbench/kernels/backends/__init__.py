"""Compilers of the kernels: Triton where it is installed, torch.compile elsewhere."""
