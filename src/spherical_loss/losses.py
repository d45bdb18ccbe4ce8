"""Every loss of the paper, and two companions: one formula each.

Letters as in the paper: ``o`` are the outputs (logits) of one example, ``D`` their number, ``c`` the target,
``s = sum(o)``, ``q = ||o||^2``, ``o_c = o[c]``.

Reference: A. de Brebisson and P. Vincent, An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family,
ICLR 2016, arXiv 1511.05042.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from spherical_loss.base import SphericalLoss
from spherical_loss.bound import bound_lambda, tightest_xi
from spherical_loss.likelihoods import QuadraticLikelihood, SoftmaxLikelihood, float_dtype, normalized
from spherical_loss.quadratic import Quadratic, quadratic_needs_float64

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

    from spherical_loss.base import SphericalLossOptions

DEFAULT_EPS = 0.01  # the order of magnitude of the paper's tuned value (0.0198 on Penn Treebank)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + e^x)``. By itself torch takes x for it above 20, where 2e-9 is missing: the bound has that D times."""
    return F.softplus(x, threshold=40.0)


TAYLOR = Quadratic(1.0, 1.0, 0.5)


class TaylorSoftmaxLoss(QuadraticLikelihood):
    r"""Negative log-likelihood of the Taylor softmax, the second-order expansion of the exponential.

    .. math:: L = -\log \frac{1 + o_c + o_c^2 / 2}{\sum_k 1 + o_k + o_k^2 / 2} = \log(D + s + q / 2) - \log(1 + o_c + o_c^2 / 2)

    The numerator is :math:`((o + 1)^2 + 1) / 2 \ge 1/2`: no parameter is needed to keep it positive, and the most probable
    class is the one with the largest :math:`|o + 1|`. Options and shapes: :class:`~spherical_loss.base.Loss`.

    >>> import torch
    >>> o = torch.tensor([[2.0, 0.0, -2.0]])
    >>> loss = TaylorSoftmaxLoss()
    >>> loss.probabilities(o)
    tensor([[0.7143, 0.1429, 0.1429]])
    >>> loss(o, torch.tensor([0]))
    tensor(0.3365)
    """

    a1, a2, a3 = TAYLOR


def _spherical(eps: float) -> Quadratic:
    if not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps}, but must be positive: without it the loss of an output o_c = 0 is infinite")
    return Quadratic(float(eps), 0.0, 1.0)


class SphericalSoftmaxLoss(QuadraticLikelihood):
    r"""Negative log-likelihood of the spherical softmax.

    .. math:: L = -\log \frac{o_c^2 + \epsilon}{\sum_k o_k^2 + \epsilon} = \log(q + D \epsilon) - \log(o_c^2 + \epsilon)

    ``eps`` is a hyperparameter that matters and needs tuning (the paper's language model uses 0.0198). The loss is even in
    ``o``, so zero weights with a zero bias never move: start from :meth:`prior_bias`, a non-zero bias, or non-zero weights.

    >>> import torch
    >>> o = torch.tensor([[2.0, 0.0, -2.0]])
    >>> SphericalSoftmaxLoss(eps=0.5).probabilities(o)
    tensor([[0.4737, 0.0526, 0.4737]])
    """

    def __init__(self, eps: float = DEFAULT_EPS, **options: Unpack[SphericalLossOptions]) -> None:
        super().__init__(**options)
        self.a1, self.a2, self.a3 = _spherical(eps)
        self.eps = self.a1

    def extra_repr(self) -> str:
        return _join(f"eps={self.eps:g}", super().extra_repr())


def _positive_quadratic(a1: float, a2: float, a3: float) -> Quadratic:
    if not a3 > 0:
        raise ValueError(f"a1 + a2 x + a3 x^2 is not positive everywhere: a3 is {a3}, but must be > 0")
    if not 4 * a1 * a3 > a2**2:
        raise ValueError(
            f"a1 + a2 x + a3 x^2 is not positive everywhere: 4 a1 a3 is {4 * a1 * a3:g}, but must be > a2^2 = {a2**2:g}"
        )
    if not (math.isfinite(a1) and math.isfinite(a2) and math.isfinite(a3)):
        raise ValueError(f"a1, a2, a3 are {a1}, {a2}, {a3}, but must be finite")
    return Quadratic(float(a1), float(a2), float(a3))


class QuadraticSoftmaxLoss(QuadraticLikelihood):
    r"""Negative log-likelihood of any positive quadratic: the general form of the two losses above.

    .. math:: L = -\log \frac{a_1 + a_2 o_c + a_3 o_c^2}{a_1 D + a_2 s + a_3 q}, \qquad a_3 > 0, \quad 4 a_1 a_3 > a_2^2

    >>> import torch
    >>> o, target = torch.randn(5, 7), torch.arange(5)
    >>> torch.allclose(QuadraticSoftmaxLoss(1, 1, 0.5)(o, target), TaylorSoftmaxLoss()(o, target))
    True
    """

    def __init__(self, a1: float, a2: float, a3: float, **options: Unpack[SphericalLossOptions]) -> None:
        super().__init__(**options)
        self.a1, self.a2, self.a3 = _positive_quadratic(a1, a2, a3)
        self.needs_float64 = quadratic_needs_float64(self.g)

    def extra_repr(self) -> str:
        return _join(f"a1={self.a1:g}, a2={self.a2:g}, a3={self.a3:g}", super().extra_repr())


def _check_target_value(target_value: float) -> None:
    if not (math.isfinite(target_value) and target_value != 0):
        raise ValueError(
            f"target_value is {target_value}, but must be finite and not zero: zero is the same target for all classes"
        )


def _squared_error(y_c: float, q: Tensor, o_c: Tensor) -> Tensor:
    return q - 2 * o_c * y_c + y_c**2


class SquaredErrorLoss(SphericalLoss):
    r"""Squared distance of the outputs from the one-hot target times ``target_value``.

    .. math:: L = \|o - y_c e_c\|^2 = q - 2 o_c y_c + y_c^2

    This is the *sum* over the D classes. The "mse" that the paper's tables report is the mean over them, :math:`L / D`,
    which only rescales the learning rate. With class probabilities as the target the loss is the expected one, which
    differs from :math:`\|o - y\|^2` by a constant.

    >>> import torch
    >>> SquaredErrorLoss()(torch.tensor([[0.5, 0.25]]), torch.tensor([0]))
    tensor(0.3125)
    """

    def __init__(self, target_value: float = 1.0, **options: Unpack[SphericalLossOptions]) -> None:
        super().__init__(**options)
        _check_target_value(target_value)
        self.target_value = float(target_value)

    def formula(self, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
        return _squared_error(self.target_value, q, o_c)

    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        return o * self.target_value

    def prior_bias(self, frequencies: Tensor) -> Tensor:
        """``b = p * target_value``: the outputs of a squared error estimate the expected target."""
        return (normalized(frequencies) * self.target_value).to(float_dtype(frequencies))

    def extra_repr(self) -> str:
        return _join(f"target_value={self.target_value:g}", super().extra_repr())


def _check_xi(xi: float | None) -> None:
    if xi is not None and not math.isfinite(xi):
        raise ValueError(f"xi is {xi}, but must be finite, or None for the tightest xi of each example")


def _softmax_bound(fixed_xi: float | None, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
    spread = (q - s * s / D).clamp_min(0)
    xi = tightest_xi(spread, D) if fixed_xi is None else spread.new_full((), abs(fixed_xi))  # the bound is even in xi
    lam = bound_lambda(xi)
    constant = -((D - 2) ** 2) / (16 * D * lam) - D * xi / 2 - D * lam * xi**2 + D * softplus(xi)
    return constant + s / D + spread * lam - o_c


class SoftmaxBoundLoss(SphericalLoss):
    r"""The paper's spherical upper bound of log-softmax, from Bouchard's bound of the log of a sum of exponentials.

    .. math::
        -\log \mathrm{softmax}(o)_c \le L = -\frac{(D-2)^2}{16 D \lambda(\xi)} - \frac{D \xi}{2} - D \lambda(\xi) \xi^2
            + D \log(1 + e^\xi) + \frac{s}{D} + \left(q - \frac{s^2}{D}\right) \lambda(\xi) - o_c

    with :math:`\lambda(\xi) = (\sigma(\xi) - 1/2) / (2 \xi) = \tanh(\xi / 2) / (4 \xi)`, 1/8 at zero. It holds for every
    ``xi``; ``xi=None`` takes the tightest one of each example. The distribution it trains is the softmax.

    >>> import torch
    >>> o, target = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([2])
    >>> bound, exact = SoftmaxBoundLoss()(o, target), SoftmaxLoss()(o, target)
    >>> f"{float(exact):.4f} <= {float(bound):.4f}"
    '1.0046 <= 1.8231'
    """

    def __init__(self, xi: float | None = None, **options: Unpack[SphericalLossOptions]) -> None:
        super().__init__(**options)
        _check_xi(xi)
        self.xi = None if xi is None else float(xi)

    def formula(self, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
        return _softmax_bound(self.xi, s, q, o_c, D)

    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        return o

    def log_probabilities(self, o: Tensor, dim: int = -1) -> Tensor:
        return F.log_softmax(o, dim)

    def prior_bias(self, frequencies: Tensor) -> Tensor:
        """``b = log p``, as for the softmax that is bounded."""
        return normalized(frequencies).log().to(float_dtype(frequencies))

    def extra_repr(self) -> str:
        return _join(f"xi={self.xi}", super().extra_repr())


def _check_z(a: float, b: float) -> None:
    if not 0 < a < math.inf:
        raise ValueError(f"a is {a}, but must be positive and finite")
    if not math.isfinite(b):
        raise ValueError(f"b is {b}, but must be finite")


def _z_loss(a: float, b: float, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
    if D == 2:
        raise ValueError(
            "ZLoss has no gradient with two classes, whose z_c is 1 or -1 whatever the outputs are; use another loss, such "
            "as TaylorSoftmaxLoss"
        )
    mean = s / D
    variance = q / D - mean**2
    # Where the outputs are in fact equal, rounding leaves a variance of some 1e-16 q / D (1e-7 without float64).
    # One class is always equal to itself, even where a head computes q in float32.
    equal = (variance <= 8 * torch.finfo(q.dtype).eps * q / D) | (D == 1)
    z_c = torch.where(equal, 0.0, (o_c - mean) / torch.where(equal, 1.0, variance).sqrt())
    return softplus(a * (b - z_c)) / a


class ZLoss(SphericalLoss):
    r"""The Z-loss: a softplus of how far the target's output is above the mean, in standard deviations.

    .. math:: L = \frac{1}{a} \log(1 + e^{a (b - z_c)}), \qquad z_c = \frac{o_c - \bar o}{\sigma},
        \quad \bar o = s / D, \quad \sigma^2 = q / D - \bar o^2

    Invariant to shifting and scaling the outputs; it ranks classes and does not model probabilities. Where all outputs
    are equal (zero weights and bias, or one class) ``z_c`` is taken as 0 with no gradient: start from weights that are
    not zero. Two classes are an error: their ``z_c`` is 1 or -1 whatever the outputs are, which leaves nothing to learn from.

    This is the Z-loss of A. de Brebisson and P. Vincent, arXiv 1604.08859, not the penalty ``log^2 Z`` that some language
    models add to cross-entropy under the same name.

    >>> import torch
    >>> ZLoss(a=1.0, b=2.0)(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2]))
    tensor(1.1541)
    """

    def __init__(self, a: float, b: float, **options: Unpack[SphericalLossOptions]) -> None:
        super().__init__(**options)
        _check_z(a, b)
        self.a, self.b = float(a), float(b)

    def formula(self, s: Tensor, q: Tensor, o_c: Tensor, D: int) -> Tensor:
        return _z_loss(self.a, self.b, s, q, o_c, D)

    def score(self, s: Tensor, q: Tensor, o: Tensor, D: int) -> Tensor:
        return o

    def extra_repr(self) -> str:
        return _join(f"a={self.a:g}, b={self.b:g}", super().extra_repr())


class SoftmaxLoss(SoftmaxLikelihood):
    r"""Log-softmax, the baseline: ``torch.nn.functional.cross_entropy`` with the interface of this library.

    .. math:: L = -o_c + \log \sum_k e^{o_k}

    >>> import torch
    >>> SoftmaxLoss()(torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([2]))
    tensor(1.0046)
    """

    @staticmethod
    def log_numerator(o: Tensor) -> Tensor:
        return o

    def prior_bias(self, frequencies: Tensor) -> Tensor:
        """``b = log p``."""
        return normalized(frequencies).log().to(float_dtype(frequencies))


class AbsSoftmaxLoss(SoftmaxLikelihood):
    r"""Log-softmax of the absolute values of the outputs: even, like the spherical softmax.

    .. math:: L = -|o_c| + \log \sum_k e^{|o_k|}

    >>> import torch
    >>> AbsSoftmaxLoss()(torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([1]))
    tensor(0.4644)
    """

    @staticmethod
    def log_numerator(o: Tensor) -> Tensor:
        return o.abs()

    def prior_bias(self, frequencies: Tensor) -> Tensor:
        """``b = 1 + log p - log min(p)``: positive, so that no class starts at the kink, where the gradient is 0."""
        log_p = normalized(frequencies).log()
        return (1 + log_p - log_p.min()).to(float_dtype(frequencies))


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
