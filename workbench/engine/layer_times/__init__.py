"""Times and sizes of the blocks of a plan's model, measured on one device."""
