"""The operators of a transformer's layers and of its ends, and what passes between them."""
