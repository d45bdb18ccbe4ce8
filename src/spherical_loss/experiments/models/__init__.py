"""Networks, their output layers, and the losses by name."""
