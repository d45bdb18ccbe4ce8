"""Side by side with what people use today, from a checkout: ``make bench``, or ``python -m benchmarks``."""
