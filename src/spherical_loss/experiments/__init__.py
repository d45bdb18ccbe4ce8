"""The paper's experiments: data, networks, a training loop, and the tables made from stored runs.

Everything here needs ``pip install spherical-loss[experiments]``; the library itself never imports it. The command line is
:mod:`spherical_loss.experiments.cli`; a run, from top to bottom, is :func:`spherical_loss.experiments.train.train`.
"""
