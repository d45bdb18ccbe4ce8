"""Benchmarks against what people use today, run from a checkout: ``make bench``, or ``python -m benchmarks``."""
