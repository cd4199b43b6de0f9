"""Model families of Hugging Face: what each public family differs in, one table."""
