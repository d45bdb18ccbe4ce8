"""A head made of heads over classes of similar frequency, and its optimizer, with a learning rate for each.

One learning rate cannot fit all classes. With biases that match the frequencies p, the output of a class under the losses of
the family is of the order of ``sqrt(p_c)``, and a step changes the probability of a class by a share that falls with its
frequency: the rate is limited by the rare classes, and the frequent ones, which are most of the data, barely learn. A rate that
grows with the square root of the frequency is the remedy. A factored head has one rate for all its rows, but statistics add:

    s = sum_t s_t,      q = sum_t q_t,      o_c from the tier that has the target,

and the gradient of tier t is ``W_t A + 1 a^T + Delta_t`` with the same A and a for all tiers. So the step of each tier is that
of a factored head with its own rate, and what the tiers share is computed once.
"""

from spherical_loss.heads.tiered.head import TieredHead
from spherical_loss.heads.tiered.sgd import TieredSGD

__all__ = ["TieredHead", "TieredSGD"]
