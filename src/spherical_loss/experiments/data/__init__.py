"""Data: the official files, texts and their vocabularies, splits and batches."""
