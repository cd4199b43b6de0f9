"""Text from a model's weights: the weights' own tokenizer and chat template, and generation."""
