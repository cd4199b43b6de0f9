"""What this engine runs beside GEMMs and attention on a GPU: bytes and kernels."""
