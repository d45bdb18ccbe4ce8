"""The search for learning rates, and what it found."""
