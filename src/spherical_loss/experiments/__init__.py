"""The paper's experiments: data, networks, a training loop, and the tables made from stored runs.

Everything here needs ``pip install spherical-loss[experiments]``, and the library imports nothing of it, but for the names of
the losses (:mod:`spherical_loss.experiments.models.loss_names`), which need torch alone. The command line is
:mod:`spherical_loss.experiments.cli`; a run, from top to bottom, is :func:`spherical_loss.experiments.training.train.train`.
"""
