"""Text and tokens on disk: read, tokenized once, cached, mixed and ordered."""
