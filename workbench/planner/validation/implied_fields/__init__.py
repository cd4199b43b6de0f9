"""What a row leaves out and its other fields, its model's name or its framework imply."""
