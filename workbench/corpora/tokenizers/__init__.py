"""Tokenizers that come with a model's weights: of a GGUF file, of a Hugging Face folder."""
