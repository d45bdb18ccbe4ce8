"""Files: locks, and generated text in documents."""
