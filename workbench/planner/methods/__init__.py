"""Methods of fine-tuning (full, LoRA, a 4-bit base) beside each other, and what each saves."""
