"""Training data: tokenized corpora and deterministic batches."""
