"""Output layers that turn a hidden vector and a target into :class:`~spherical_loss.Statistics`.

All heads give the same statistics and the same exact gradients; they differ in cost and in who owns the weights.

=================  ==========================  ==================  ==========================
head               cost of a step, N examples  weights             optimizer
=================  ==========================  ==================  ==========================
``DenseHead``      O(N d D), logits            a parameter         any
``GramHead``       O(D d^2 + N d^2)            a parameter         any
``FactoredHead``   O(N d^2), whatever D is     factors of its own  exact SGD: ``FactoredSGD``
=================  ==========================  ==================  ==========================
"""

from spherical_loss.heads.base import Head, TopK
from spherical_loss.heads.dense import DenseHead
from spherical_loss.heads.factored import FactoredHead, FactoredSGD
from spherical_loss.heads.gram import GramHead, Plan
from spherical_loss.heads.retrieval import FaissIndex

__all__ = ["DenseHead", "FactoredHead", "FactoredSGD", "FaissIndex", "GramHead", "Head", "Plan", "TopK"]
