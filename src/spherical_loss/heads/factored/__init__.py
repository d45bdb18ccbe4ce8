"""The head whose training step costs O(N d^2), whatever the number of classes, and its optimizer."""

from spherical_loss.heads.factored.head import FactoredHead
from spherical_loss.heads.factored.sgd import FactoredSGD

__all__ = ["FactoredHead", "FactoredSGD"]
