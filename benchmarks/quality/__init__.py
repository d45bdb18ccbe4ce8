"""Quality for time: the same language model with different output layers, after the same training time."""
