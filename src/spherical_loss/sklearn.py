"""A scikit-learn classifier trained with the losses and heads of this library (the ``sklearn`` extra)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

try:
    import numpy as np
    from scipy.sparse import csr_array, issparse, vstack
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state, column_or_1d
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("SphericalClassifier needs scikit-learn 1.6 or newer: pip install 'spherical-loss[sklearn]'") from error

from spherical_loss.base import Loss, SphericalLoss
from spherical_loss.heads import (
    AdaptiveSphericalSoftmax,
    DenseHead,
    FactoredHead,
    FactoredSGD,
    GramHead,
    Head,
    LikelihoodLayer,
    TieredHead,
    TieredSGD,
)
from spherical_loss.heads.tiered.sgd import POWER
from spherical_loss.learning_rate import STABLE_SHARE, stable_lr
from spherical_loss.losses import (
    AbsSoftmaxLoss,
    SoftmaxBoundLoss,
    SoftmaxLoss,
    SphericalSoftmaxLoss,
    SquaredErrorLoss,
    TaylorSoftmaxLoss,
    ZLoss,
)
from spherical_loss.perceptron import Perceptron, Rows

LOSSES: dict[str, Callable[[], Loss]] = {
    "taylor": TaylorSoftmaxLoss,
    "spherical": SphericalSoftmaxLoss,
    "mse": SquaredErrorLoss,
    "bound": SoftmaxBoundLoss,
    "bound-fixed": lambda: SoftmaxBoundLoss(xi=3.0),
    "z": lambda: ZLoss(a=1.0, b=3.0),
    "softmax": SoftmaxLoss,
    "abs": AbsSoftmaxLoss,
}
HEADS: dict[str, type[Head]] = {"dense": DenseHead, "gram": GramHead, "factored": FactoredHead}
HEAD_NAMES = ("auto", *HEADS, "tiered", "adaptive")
FREQUENT = 2_000  # classes of the softmax of the adaptive head, and half of all classes at most
MANY_CLASSES = 50_000  # above, the steps of an optimizer over D x d weights take longer than everything else
NUMBERS = (int, float, np.integer, np.floating)
WIDE = 1024  # hidden vectors above this size make d x d matrices slow
TRUE_FROM = 0.5  # of the most probable class's probability: a class with at least so much is predicted beside it


class SphericalClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A perceptron with any loss and any head of this library, as a scikit-learn estimator.

    X is dense or sparse, and is never made dense as a whole. y is one class for each row, or an indicator matrix, (n, D), of
    several true classes, dense or sparse. The network computes in the dtype of X: float32 stays float32.
    The model is trained by AdamW, factored and tiered heads by their exact SGD, with rates that fall linearly to zero.

    Args:
        loss: ``"taylor"``, ``"spherical"``, ``"mse"``, ``"bound"``, ``"bound-fixed"``, ``"z"``, ``"softmax"``, ``"abs"``,
            or a loss itself. ``predict_proba`` and ``predict_log_proba`` exist where the loss models probabilities.
        head: ``"dense"``, ``"gram"`` or ``"factored"``. ``"auto"`` takes the factored head from 50,000 classes on. Below, it
            takes the gram head if D is at least the batch size and the batch size at least d, and else the dense head.
            ``"softmax"`` and ``"abs"`` need logits, and so the dense head. ``"tiered"`` is a
            :class:`TieredHead`, factored with larger steps for more frequent classes; ``"adaptive"`` is an
            :class:`AdaptiveSphericalSoftmax`, a softmax over the 2,000 most frequent classes, with the loss, ``"taylor"`` or
            ``"spherical"``, over the others. Both count the classes of the data (of the first call of ``partial_fit``).
        hidden_layer_sizes: ReLU units of each hidden layer; ``()`` for a linear model. The first layer takes the rows of
            a sparse X as they are, and updates only the weights of features that occur; without a hidden layer each
            minibatch is made dense.
        learning_rate: of AdamW, which trains all but factored and tiered heads.
        factored_step: step of a factored head, or of the most frequent tier, as a share of the largest one that is certainly
            stable, at the start and for the current batch. A plain rate would have to be searched for: good ones grow with D.
            The default is the share of :func:`spherical_loss.suggested_lr`. Above 0.25 steps get expensive.
        weight_decay: each step shrinks the weights by ``learning_rate * weight_decay``, but not those of a sparse X's features.
        class_weight: a dict from classes to weights, ``"balanced"`` for weights that make all classes count alike, or None. It
            multiplies the sample weights; for an indicator matrix the classes are its columns.
        max_iter: passes over the data.
        batch_size: examples per step; ``"auto"`` gives about a hundred steps per pass, between 64 and 1024 examples each.
        standardize: whether ``fit`` centres and scales the features (``partial_fit`` cannot, and takes X as it is). A
            sparse X is divided by a single number, so that it stays sparse.
        early_stopping: stop when the loss of held-out examples has not fallen by ``tol`` for ``n_iter_no_change`` passes.
        validation_fraction: the share of the examples that is held out for that.
        n_iter_no_change: passes without progress before early stopping.
        tol: what counts as progress.
        random_state: a number makes results reproducible.

    Attributes: ``classes_``, ``n_features_in_``, ``feature_names_in_``, ``n_iter_``, ``head_`` (the trained head),
    ``loss_curve_`` and, with early stopping, ``validation_curve_`` (one number per pass).

    **Several true classes.** The losses of the true classes of a row are added. Its probabilities are shares, and sum to one.
    ``predict`` returns an indicator matrix, sparse if that of ``fit`` was: of the classes at least half as probable as the most
    probable one. ``predict_topk`` and ``decision_function`` rank the classes. A row without a true class teaches nothing.

    An example of weight 0 is treated as absent, and so is its class. Integer weights equal repeated examples: exactly if all
    examples fit into one batch, and on average otherwise.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> SphericalClassifier(loss="spherical", random_state=0).fit(X, y).score(X, y) > 0.9
    True
    """

    def __init__(
        self,
        loss: str | Loss = "taylor",
        *,
        head: str = "auto",
        hidden_layer_sizes: tuple[int, ...] = (100,),
        learning_rate: float = 0.01,
        factored_step: float = STABLE_SHARE,
        weight_decay: float = 0.0,
        class_weight: Any = None,
        max_iter: int = 200,
        batch_size: int | str = "auto",
        standardize: bool = True,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        tol: float = 1e-4,
        random_state: Any = None,
    ) -> None:
        self.loss = loss
        self.head = head
        self.hidden_layer_sizes = hidden_layer_sizes
        self.learning_rate = learning_rate
        self.factored_step = factored_step
        self.weight_decay = weight_decay
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.standardize = standardize
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_label = True
        return tags

    # Training ------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SphericalClassifier:
        """Train from scratch."""
        self._check_parameters()
        X, y, weight = self._checked(X, y, sample_weight, reset=True)
        self._multilabel = y.ndim == 2
        if self._multilabel:
            self.classes_, target = np.arange(y.shape[1]), y
        else:
            self.classes_, target = np.unique(y, return_inverse=True)
        self._start(X, _counts(target, weight, len(self.classes_)), weight if self.standardize else None)
        target, weight = self._weighted(target, weight)
        train, held_out = self._split(X.shape[0])
        optimizers = self._optimizers()
        self.loss_curve_: list[float] = []
        self.validation_curve_: list[float] = []
        for epoch in range(self.max_iter):
            parts = list(self._shuffled(train))
            rates = [1 - (epoch + i / len(parts)) / self.max_iter for i in range(len(parts))]
            self.loss_curve_.append(self._pass(X, target, weight, parts, rates, optimizers))
            if self.early_stopping:
                self.validation_curve_.append(self._mean_loss(X, target, weight, held_out))
                if self._no_progress():
                    break
        self.n_iter_ = len(self.loss_curve_)
        self._moments: list[Any] | None = None
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> SphericalClassifier:
        """One pass over these examples, with constant rates. The first call must name all ``classes`` that will ever occur."""
        self._check_parameters()
        first = not hasattr(self, "network_")
        if isinstance(self.class_weight, str):
            raise ValueError(
                "class_weight='balanced' needs all of y, which partial_fit does not have: compute the weights with "
                "sklearn.utils.class_weight.compute_class_weight, and give them as a dict"
            )
        X, y, weight = self._checked(X, y, sample_weight, reset=first)
        if first and classes is None and y.ndim == 1:
            raise ValueError("classes must be given to the first call of partial_fit: all classes that y will ever have")
        if classes is not None and not first and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError("classes are not those of the first call of partial_fit; leave them out of later calls")
        if first:
            known = np.arange(y.shape[1]) if classes is None else np.unique(classes)
        else:
            known = self.classes_
            if self._multilabel != (y.ndim == 2):
                raise ValueError("y is an indicator matrix in some calls of partial_fit, and in others it is not")
        target = self._known_labels(y, known)
        if first:
            self.classes_, self._multilabel = known, y.ndim == 2
            self._start(X, _counts(target, weight, len(known)), None)
            self.n_iter_, self.loss_curve_, self._moments = 0, [], None
        target, weight = self._weighted(target, weight)
        parts = list(self._shuffled(np.arange(X.shape[0])))
        optimizers = self._optimizers()
        self.loss_curve_.append(self._pass(X, target, weight, parts, [1.0] * len(parts), optimizers))
        self._moments = [optimizer.state_dict() for optimizer in optimizers]
        self.n_iter_ += 1
        return self

    @staticmethod
    def _known_labels(y: Any, known: Any) -> Any:
        """y by the positions of its labels among the known ones; an indicator matrix has them already."""
        if y.ndim == 2:
            if y.shape[1] != len(known):
                raise ValueError(f"y has {y.shape[1]} columns, but there are {len(known)} classes")
            return y
        target = np.searchsorted(known, y).clip(max=len(known) - 1)
        if not np.array_equal(known[target], y):
            unknown = y[known[target] != y][0]
            raise ValueError(f"y has the label {unknown}, which is not among the classes of the first call of partial_fit")
        return target

    def _check_parameters(self) -> None:
        loss = self._made_loss()
        if self.head not in HEAD_NAMES:
            raise ValueError(f"head {self.head!r} is not known; use one of {', '.join(HEAD_NAMES)}")
        if self.head == "adaptive" and not (isinstance(loss, SphericalLoss) and loss.is_likelihood):
            raise ValueError(f"the adaptive head needs a likelihood of the family, not {loss}: use 'taylor' or 'spherical'")
        sizes = self.hidden_layer_sizes
        if not (isinstance(sizes, Sequence | np.ndarray) and all(_positive_integer(n) for n in sizes)):
            raise ValueError(f"hidden_layer_sizes is {sizes!r}, but must be a tuple of positive integers, such as (100,) or ()")
        if self.batch_size != "auto" and not _positive_integer(self.batch_size):
            raise ValueError(f"batch_size is {self.batch_size!r}, but must be a positive integer or 'auto'")
        if not (self.class_weight is None or self.class_weight == "balanced" or isinstance(self.class_weight, dict)):
            raise ValueError(f"class_weight is {self.class_weight!r}, but must be a dict, 'balanced' or None")
        for name in ("max_iter", "n_iter_no_change"):
            if not _positive_integer(value := getattr(self, name)):
                raise ValueError(f"{name} is {value!r}, but must be a positive integer")
        for name in ("learning_rate", "weight_decay", "tol"):
            if not (isinstance(value := getattr(self, name), NUMBERS) and 0 <= value < float("inf")):
                raise ValueError(f"{name} is {value!r}, but must be a finite number that is not negative")
        for name in ("factored_step", "validation_fraction"):  # a larger step may diverge
            if not (isinstance(value := getattr(self, name), NUMBERS) and 0 < value < 1):
                raise ValueError(f"{name} is {value!r}, but must be a number between 0 and 1")

    def _made_loss(self) -> Loss:
        """A copy of the loss without reduction, since sample weights are applied before it."""
        if isinstance(self.loss, Loss):
            loss = copy.deepcopy(self.loss)
        elif isinstance(self.loss, str) and self.loss in LOSSES:
            loss = LOSSES[self.loss]()
        else:
            raise ValueError(f"loss {self.loss!r} is not known; use an instance of a Loss or one of {', '.join(LOSSES)}")
        loss.reduction = "none"
        return loss

    def _checked(self, X: Any, y: Any, sample_weight: Any, reset: bool) -> tuple[Rows, Any, Any]:
        """X as floating-point rows, y as it is or a CSR array, weights of mean 1; without the examples of weight 0."""
        X, y = validate_data(self, X, y, reset=reset, accept_sparse="csr", dtype=[np.float64, np.float32], multi_output=True)
        if y.ndim == 2 and y.shape[1] == 1 and not issparse(y):
            y = column_or_1d(y, warn=True)
        with warnings.catch_warnings():  # as many classes as examples are normal here
            warnings.filterwarnings("ignore", message="The number of unique classes")
            check_classification_targets(y)
            kind = type_of_target(y)
        X = csr_array(X) if issparse(X) else X  # not a matrix, whose ``*`` is the matrix product
        if y.ndim == 2:
            if kind != "multilabel-indicator" or not np.isin(y.data if issparse(y) else y, (0, 1)).all():
                raise ValueError(
                    f"y of shape {y.shape} is {kind}, but must be one class for each row, or an indicator matrix of 0 and 1"
                )
            self._sparse_y = issparse(y)
            y = csr_array(y, dtype=X.dtype)
            y.eliminate_zeros()
        if sample_weight is None:
            return X, y, np.ones(X.shape[0], dtype=X.dtype)
        weight = _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)
        kept = weight > 0
        if not kept.any():
            raise ValueError("sample_weight is zero for every example; at least one must count")
        return X[kept], y[kept], weight[kept] / weight[kept].mean()

    def _weighted(self, target: Any, weight: Any) -> tuple[Any, Any]:
        """Targets, and the weights of examples times those of their classes, of mean 1; an indicator matrix takes them up."""
        D = len(self.classes_)
        labels = target.indices if self._multilabel else target
        of_class = np.ones(D)
        if self.class_weight == "balanced":
            present = np.unique(labels)
            of_class[present] = compute_class_weight("balanced", classes=present, y=labels)
        elif self.class_weight is not None:
            of_class = compute_class_weight(self.class_weight, classes=self.classes_, y=self.classes_)
        if not self._multilabel:
            weight = weight * of_class[target].astype(weight.dtype)
            return target, weight / max(weight.mean(), np.finfo(weight.dtype).tiny)
        target = csr_array(target * weight[:, None] * of_class.astype(weight.dtype))
        return target / max(target.sum() / target.shape[0], np.finfo(weight.dtype).tiny), np.ones_like(weight)

    def _start(self, X: Rows, counts: Tensor, weight: Any | None) -> None:
        """An untrained network; ``weight`` to standardize X, or None to take it as it is."""
        self._rng = np.random.RandomState(check_random_state(self.random_state).randint(2**31 - 1))
        loss, D, d = self._made_loss(), len(self.classes_), (X.shape[1], *self.hidden_layer_sizes)[-1]
        # With this bias and zero weights all classes are equal, and all of them get a gradient.
        bias = loss.prior_bias(torch.ones(D)) if loss.has_prior_bias else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(self._rng.randint(2**31 - 1)))
            name = self._head_name(loss, d, D, self._examples(X.shape[0]))
            head: Head | LikelihoodLayer
            if name == "adaptive":
                assert isinstance(loss, SphericalLoss)
                head = AdaptiveSphericalSoftmax(d, D, min(FREQUENT, D // 2), loss, counts + 1)
            elif name == "tiered":
                head = TieredHead.by_frequency(d, counts + 1, loss=loss)
            else:
                head = HEADS[name](d, D, init="he" if bias is None else "zero")
            network = Perceptron(X.shape[1], self.hidden_layer_sizes, issparse(X), head)
        self._first_rate = 0.0
        self.network_ = network.to(torch.from_numpy(np.empty(0, X.dtype)).dtype)
        if bias is not None and isinstance(head, Head) and name != "tiered":  # which has started at the counts
            head.set_bias(bias)
        if weight is not None:
            network.standardize(X, weight)

    def _head_name(self, loss: Loss, d: int, D: int, examples: int) -> str:
        if self.head != "auto":
            return self.head
        if not isinstance(loss, SphericalLoss) or loss.label_smoothing > 0:
            return "dense"
        if D >= MANY_CLASSES and d <= WIDE:
            return "factored"
        return "gram" if D >= examples >= d else "dense"

    def _examples(self, n: int) -> int:
        return int(np.clip(n // 100, 64, 1024)) if self.batch_size == "auto" else int(self.batch_size)

    def _split(self, n: int) -> tuple[Any, Any]:
        """The examples to train with, and those held out."""
        count = int(np.ceil(self.validation_fraction * n)) if self.early_stopping else 0
        if count == n:
            raise ValueError(f"early_stopping would hold out all {n} examples (n_samples={n}); turn it off")
        order = self._rng.permutation(n) if count else np.arange(n)
        return order[count:], order[:count]

    def _shuffled(self, examples: Any) -> Iterator[Any]:
        order, size = self._rng.permutation(examples), self._examples(len(examples))
        return (order[i : i + size] for i in range(0, len(order), size))

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """An optimizer for each kind of weights: dense, sparse (the features of a sparse X), and factored."""
        network, rate, decay = self.network_, self.learning_rate, self.weight_decay
        dense = [p for p in network.parameters() if p is not network.sparse_weight]
        optimizers: list[torch.optim.Optimizer] = []
        if dense:
            optimizers.append(torch.optim.AdamW(dense, lr=rate, weight_decay=decay))
        if network.sparse_weight is not None:
            optimizers.append(torch.optim.SparseAdam([network.sparse_weight], lr=rate))
        head = network.head.tail if isinstance(network.head, AdaptiveSphericalSoftmax) else network.head
        if isinstance(head, FactoredHead):
            optimizers.append(FactoredSGD(head, lr=0.0))
        elif isinstance(head, TieredHead):
            optimizers.append(TieredSGD(head, lr=0.0))
        for optimizer, moments in zip(optimizers, getattr(self, "_moments", None) or [], strict=False):
            optimizer.load_state_dict(moments)
        return optimizers

    def _pass(
        self, X: Rows, target: Any, weight: Any, parts: list[Any], rates: list[float], optimizers: list[torch.optim.Optimizer]
    ) -> float:
        """Make one step for each part of the examples; returns the mean loss."""
        loss, network, total = self._made_loss(), self.network_.train(), 0.0
        for part, rate in zip(parts, rates, strict=True):
            value = self._objective(loss, X, target, weight, part)
            for optimizer in optimizers:
                optimizer.zero_grad()
            value.backward()
            for optimizer in optimizers:
                self._set_rate(optimizer, rate)
                optimizer.step()
            total += float(value.detach()) * len(part)
        network.eval()
        if not np.isfinite(total):
            raise FloatingPointError(f"the loss is not finite; lower learning_rate={self.learning_rate}")
        return total / sum(map(len, parts))

    def _objective(self, loss: Loss, X: Rows, target: Any, weight: Any, part: Any) -> Tensor:
        losses = self.network_.losses(X[part], target[part], loss)
        return (losses * torch.from_numpy(weight[part])).mean()

    def _set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        if not isinstance(optimizer, FactoredSGD | TieredSGD):
            optimizer.param_groups[0]["lr"] = rate * self.learning_rate
            return
        # Never above that of the first step: the rate grows with the outputs, and they grow with the rate, without end.
        stable = stable_lr(optimizer.head)
        self._first_rate = self._first_rate or stable
        largest = rate * self.factored_step * min(stable, self._first_rate)
        factors = optimizer.head.tier_factors(POWER) if isinstance(optimizer, TieredSGD) else [1.0]
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = largest * factor / max(factors)
            group["weight_decay"] = rate * self.learning_rate * self.weight_decay / group["lr"] if group["lr"] > 0 else 0.0

    @torch.no_grad()
    def _mean_loss(self, X: Rows, target: Any, weight: Any, examples: Any) -> float:
        loss, size = self._made_loss(), self._examples(len(examples))
        parts = [examples[i : i + size] for i in range(0, len(examples), size)]
        return sum(float(self._objective(loss, X, target, weight, part)) * len(part) for part in parts) / len(examples)

    def _no_progress(self) -> bool:
        earlier, recent = self.validation_curve_[: -self.n_iter_no_change], self.validation_curve_[-self.n_iter_no_change :]
        return bool(earlier) and min(recent) > min(earlier) - self.tol

    # Prediction ----------------------------------------------------------------------------------------------------

    @property
    def head_(self) -> Head | LikelihoodLayer:
        """The trained head."""
        check_is_fitted(self)
        return self.network_.head

    def predict(self, X: Any) -> Any:
        """The most probable class of each row, (n,); after ``fit`` of an indicator matrix, such a matrix, (n, D)."""
        check_is_fitted(self)
        if not self._multilabel:
            return self.predict_topk(X, 1)[:, 0]
        if isinstance(loss := self._made_loss(), ZLoss):
            raise ValueError(f"{loss} ranks classes, and does not say how many are true; use predict_topk or another loss")
        rows = max(1, 2**22 // len(self.classes_))
        found = [self._true(part) for hidden in self._hidden(X) for part in hidden.split(rows)]
        return vstack(found, format="csr") if self._sparse_y else vstack(found).toarray()

    def _true(self, hidden: Tensor) -> Any:
        loss = self._loss_of_outputs()
        o = self.network_.outputs(hidden).detach()
        score = loss.probabilities(o) if loss.has_probabilities else self._scores(o)
        return csr_array((score >= TRUE_FROM * score.max(1, keepdim=True).values).numpy().astype(np.int64))

    def predict_topk(self, X: Any, k: int) -> Any:
        """The ``k`` most probable classes of each row, best first, (n, k): an exact search that never holds n x D numbers."""
        found = [self.network_.topk(hidden, k, self._made_loss()).numpy() for hidden in self._hidden(X)]
        return self.classes_[np.concatenate(found)]

    def decision_function(self, X: Any) -> Any:
        """Log-probabilities, or the scores of a loss without them, (n, D); for two classes the difference, (n,)."""
        scores = self._of_outputs(X, self._scores)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 and not self._multilabel else scores

    def _scores(self, o: Tensor) -> Tensor:
        loss = self._loss_of_outputs()
        if loss.has_probabilities:
            return loss.log_probabilities(o)
        return loss.score(o.sum(1, keepdim=True), o.square().sum(1, keepdim=True), o, o.shape[1])

    @available_if(lambda self: self._made_loss().has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """The probabilities of all classes, (n, D)."""
        return self._of_outputs(X, self._loss_of_outputs().probabilities)

    @available_if(lambda self: self._made_loss().has_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Any:
        """The logarithms of :meth:`predict_proba`."""
        return self._of_outputs(X, self._loss_of_outputs().log_probabilities)

    def _loss_of_outputs(self) -> Loss:
        """The loss whose probabilities the outputs have; log-probabilities are the outputs of a softmax."""
        return SoftmaxLoss() if isinstance(self.head_, LikelihoodLayer) else self._made_loss()

    def _of_outputs(self, X: Any, function: Callable[[Tensor], Tensor]) -> Any:
        return np.concatenate([function(self.network_.outputs(hidden).detach()).numpy() for hidden in self._hidden(X)])

    def _hidden(self, X: Any) -> Iterator[Tensor]:
        """The hidden vectors of X, some rows at a time."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=[np.float64, np.float32])
        rows = max(1, 2**22 // max(1, X.shape[1]))  # as dense rows, 32 MiB of float64
        with torch.no_grad():
            yield from (self.network_.hidden(X[i : i + rows]) for i in range(0, X.shape[0], rows))


def _counts(target: Any, weight: Any, D: int) -> Tensor:
    """How often each class occurs, (D,)."""
    if target.ndim == 2:
        return torch.from_numpy(target.T @ weight)
    return torch.from_numpy(np.bincount(target, weights=weight, minlength=D))


def _positive_integer(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= 1
