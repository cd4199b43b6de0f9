"""The unequal space: stages cut, replicated and placed each by itself (DAPPLE, 2007.01045)."""
