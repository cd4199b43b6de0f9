"""Export of weights: under names of Hugging Face, or as one GGUF file."""
