"""The head whose training step costs O(N d^2), whatever the number of classes, and its optimizer.

Reference: P. Vincent, A. de Brebisson, X. Bouthillier, Efficient Exact Gradient Update for Training Deep Networks with Very
Large Sparse Targets, 2015, arXiv 1412.7091.

The representation. With the bias as one more column of W, and the hidden vectors extended by a one,

    W = V U + 1 w0^T,      and beside it     Q = W^T W,      w = W^T 1.

An SGD step multiplies every row of W by the same d x d matrix, which goes into U, and changes the rows of the batch's targets,
which go into V through ``U^-1``. V is D x d; all else is small.

==================  =======================================================================================
``head``            ``FactoredHead``: reads and replaces W
``statistics``      forward and backward pass: s, q, o_c, and what the step needs
``batch``           ``BatchGradients``: what backward passes leave for the step
``keeper``          ``GradientKeeper``: keeps it until there is one
``step``            the step, as five updates: U, w0, V, w, Q
``sgd``             ``FactoredSGD``: options, clipping, schedulers
``nearby``          ``Nearby``: whether training is chaotic, for few classes
``transform``       ``RowTransform``: U, its inverse, and how both stay accurate
``weighted_gram``   ``A = 2 H^T diag(g_q) H`` and its products
``accumulator``     a matrix that takes many small changes without drift: Q
``shard``           which rows a process keeps
==================  =======================================================================================
"""

from spherical_loss.heads.factored.head import FactoredHead
from spherical_loss.heads.factored.sgd import FactoredSGD

__all__ = ["FactoredHead", "FactoredSGD"]
