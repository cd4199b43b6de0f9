"""The update of a step: AdamW and SGD on master weights, loss scaling, delayed updates."""
