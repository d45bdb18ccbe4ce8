"""Output layers that turn a hidden vector and a target into :class:`~spherical_loss.Statistics`.

All heads give the same statistics and the same exact gradients; they differ in cost and in who owns the weights.

=================  ==========================  ==================  ==========================
head               cost of a step, N examples  weights             optimizer
=================  ==========================  ==================  ==========================
``DenseHead``      O(N d D), logits            a parameter         any
``GramHead``       O(D d^2 + N d^2)            a parameter         any
``FactoredHead``   O(N d^2), whatever D is     factors of its own  exact SGD: ``FactoredSGD``
``TieredHead``     O(T N d^2) for T tiers      those of its tiers  exact SGD: ``TieredSGD``
=================  ==========================  ==================  ==========================

Two layers are head and likelihood in one, with the interface of ``torch.nn.AdaptiveLogSoftmaxWithLoss``:
``AdaptiveSphericalSoftmax``, a softmax over the frequent classes and one of these heads for the others, and ``SampledSoftmax``,
an approximation of the softmax over all.
"""

from spherical_loss.heads.adaptive import AdaptiveSphericalSoftmax
from spherical_loss.heads.base import Head, TopK
from spherical_loss.heads.dense import DenseHead
from spherical_loss.heads.factored import FactoredHead, FactoredSGD
from spherical_loss.heads.gram import GramHead, Plan
from spherical_loss.heads.likelihood import LikelihoodLayer, OutputAndLoss
from spherical_loss.heads.retrieval import FaissIndex
from spherical_loss.heads.sampled import SampledSoftmax
from spherical_loss.heads.tiered import TieredHead, TieredSGD

__all__ = [
    "AdaptiveSphericalSoftmax",
    "DenseHead",
    "FactoredHead",
    "FactoredSGD",
    "FaissIndex",
    "GramHead",
    "Head",
    "LikelihoodLayer",
    "OutputAndLoss",
    "Plan",
    "SampledSoftmax",
    "TieredHead",
    "TieredSGD",
    "TopK",
]
