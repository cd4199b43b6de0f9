"""Conversations, completions and preference pairs: read, rendered, and marked where answers are."""
