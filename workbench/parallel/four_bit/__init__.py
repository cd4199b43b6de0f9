"""Linear layers whose frozen weight is stored in 4 bits."""
