"""One run: its task, its settings, the training loop, and the folder it is stored in."""
