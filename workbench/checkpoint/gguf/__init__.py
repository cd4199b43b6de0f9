"""GGUF files of weights: read onto any mesh, written from a checkpoint."""
