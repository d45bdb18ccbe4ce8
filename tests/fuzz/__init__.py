"""Random attacks: what they do follows from a seed, and a wrong number or a wrong message is an AssertionError.

``tests/test_fuzz.py`` runs the first seeds of each; for more of them::

    python -m tests.fuzz --minutes 10 --seed 1000

and for all learning rates of a grid::

    python -m tests.fuzz.grid
"""
