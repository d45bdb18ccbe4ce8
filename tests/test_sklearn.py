"""The scikit-learn estimator: scikit-learn's own checks, every loss and head, sparse X, very many classes."""

from __future__ import annotations

import importlib
import math
import pickle
import sys

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array, issparse, random_array
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch.utils._python_dispatch import TorchDispatchMode

from spherical_loss import (
    AdaptiveSphericalSoftmax,
    FactoredHead,
    FactoredSGD,
    GramHead,
    SphericalSoftmaxLoss,
    TaylorSoftmaxLoss,
    TieredHead,
    TieredSGD,
)
from spherical_loss.learning_rate import suggested_lr
from spherical_loss.sklearn import LOSSES, SphericalClassifier
from tests.support import oracle


@parametrize_with_checks([SphericalClassifier(max_iter=15)])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


def topics(n: int, D: int, features: int, seed: int = 0) -> tuple[csr_array, np.ndarray]:
    """Rows of word counts: each class has five words of its own, among many that say nothing."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(n) % D
    noise = random_array((n, features), density=0.01, format="csr", rng=rng)
    words = 5 * y[:, None] + rng.integers(5, size=(n, 3))
    own = csr_array((np.ones(3 * n), (np.repeat(np.arange(n), 3), words.ravel())), shape=(n, features))
    return csr_array(noise + own), y


def test_digits_as_good_as_logistic_regression():
    X, X_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    ours = SphericalClassifier(random_state=0, max_iter=15).fit(X, y).score(X_test, y_test)
    assert ours > LogisticRegression(max_iter=300, tol=1e-2).fit(X / 16, y).score(X_test / 16, y_test) - 0.02


@pytest.mark.parametrize(
    ("loss", "head"), [*((loss, "dense") for loss in LOSSES), *(("taylor", head) for head in ("gram", "factored", "tiered"))]
)
def test_every_loss_and_every_head_learns(iris, loss, head):
    model = SphericalClassifier(loss, head=head, batch_size=15, max_iter=20, random_state=0)
    assert model.fit(*iris).score(*iris) > 0.85


@pytest.mark.parametrize("head", ["gram", "factored", "tiered"])
@pytest.mark.parametrize("loss", ["softmax", "abs"])
def test_heads_without_logits_take_the_family_only(iris, loss, head):
    with pytest.raises(TypeError, match="outside the spherical family"):
        SphericalClassifier(loss, head=head).fit(*iris)


def test_dense_and_gram_are_the_same_model(iris):
    X, y = iris
    dense, gram = (SphericalClassifier(head=head, max_iter=3, random_state=0).fit(X, y) for head in ("dense", "gram"))
    np.testing.assert_allclose(dense.predict_proba(X), gram.predict_proba(X), rtol=1e-8)


def test_probabilities_are_those_of_the_loss(iris):
    X, y = iris
    model = SphericalClassifier("taylor", hidden_layer_sizes=(), standardize=False, max_iter=3, random_state=0).fit(X, y)
    o = torch.from_numpy(X) @ model.head_.weight.detach().T + model.head_.bias.detach()
    expected = torch.exp(-oracle.quadratic(1.0, 1.0, 0.5)(o)).numpy()
    np.testing.assert_allclose(model.predict_proba(X), expected, rtol=1e-10)
    np.testing.assert_allclose(model.decision_function(X), np.log(expected), rtol=1e-10)
    np.testing.assert_array_equal(model.predict(X), expected.argmax(1))
    np.testing.assert_array_equal(model.predict_topk(X, 3), np.argsort(-expected, 1))


@pytest.mark.parametrize("loss", ["mse", "z"])
def test_no_probabilities_where_the_loss_has_none(iris, loss):
    model = SphericalClassifier(loss, max_iter=2, random_state=0).fit(*iris)
    for method in ("predict_proba", "predict_log_proba"):
        with pytest.raises(AttributeError, match=f"no attribute '{method}'"):
            getattr(model, method)
    np.testing.assert_array_equal(model.decision_function(iris[0]).argmax(1), model.predict(iris[0]))


def test_a_loss_given_as_an_instance_is_left_as_it_was(iris):
    loss = SphericalSoftmaxLoss(eps=0.3, reduction="sum", label_smoothing=0.1)
    model = clone(SphericalClassifier(loss, max_iter=2, random_state=0)).fit(*iris)
    assert model.loss.eps == 0.3
    assert loss.reduction == model.loss.reduction == "sum"
    assert "eps=0.3" in repr(model)


def test_sparse_x_is_learned_and_never_dense():
    X, y = topics(600, 20, 20_000)
    model = SphericalClassifier(max_iter=10, random_state=0)
    with Largest() as largest:
        model.fit(X[:500], y[:500])
        assert model.score(X[500:], y[500:]) > 0.9
    assert largest.numel <= 20_000 * 100  # the first layer; X has five times as many entries


def test_sparse_and_dense_x_give_the_same_predictions():
    X, y = topics(100, 4, 50)
    for trained, other in ((X, X.toarray()), (X.toarray(), X)):
        model = SphericalClassifier(max_iter=3, random_state=0).fit(trained, y)
        np.testing.assert_allclose(model.predict_proba(other), model.predict_proba(trained), rtol=1e-10)
    linear = SphericalClassifier(hidden_layer_sizes=(), standardize=False, max_iter=3, random_state=0)
    np.testing.assert_allclose(linear.fit(X, y).predict_proba(X), linear.fit(X.toarray(), y).predict_proba(X), rtol=1e-10)


def test_head_is_chosen_from_the_shapes():
    def chosen(D, loss="taylor", **options):
        model = SphericalClassifier(loss, random_state=0, **options)
        return type(model.partial_fit(np.zeros((1, 4), np.float32), [0], classes=np.arange(D)).head_).__name__

    assert chosen(10) == "DenseHead"
    assert chosen(500, batch_size=128) == "GramHead"
    assert chosen(50_000) == "FactoredHead"
    assert chosen(50_000, loss="softmax", hidden_layer_sizes=()) == "DenseHead"
    assert chosen(500, loss=TaylorSoftmaxLoss(label_smoothing=0.1), batch_size=128) == "DenseHead"


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.layout == torch.strided:
                self.numel = max(self.numel, x.numel())
        return result


def test_a_million_classes_without_the_logits():
    D, n, d = 1_000_000, 128, 8
    X, y = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32), np.arange(n) * 7_000
    model = SphericalClassifier(hidden_layer_sizes=(32,), batch_size=n, random_state=0)
    with Largest() as largest:
        model.partial_fit(X, y, classes=np.arange(D))
        for _ in range(200):
            model.partial_fit(X, y)
        assert isinstance(model.head_, FactoredHead)
        assert model.score(X, y) > 0.75  # chance is one in a million
        assert model.predict_topk(X, 5).shape == (n, 5)
    assert largest.numel <= D * 40  # V, with its bias and empty columns; all logits would be three times that


def test_partial_fit_continues_and_survives_pickling(iris):
    X, y = iris
    for head in ("dense", "factored"):
        whole, pickled = (SphericalClassifier(head=head, batch_size=15, random_state=0) for _ in range(2))
        for _ in range(8):
            whole.partial_fit(X, y, classes=[0, 1, 2])
            pickled = pickle.loads(pickle.dumps(pickled)).partial_fit(X, y, classes=[0, 1, 2])
        np.testing.assert_array_equal(whole.decision_function(X), pickled.decision_function(X))
        assert whole.loss_curve_[-1] < 0.7 * whole.loss_curve_[0]
        assert whole.n_iter_ == 8


def test_partial_fit_says_what_is_wrong(iris):
    X, y = iris
    with pytest.raises(ValueError, match="classes must be given"):
        SphericalClassifier().partial_fit(X, y)
    model = SphericalClassifier().partial_fit(X, y, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="label 7"):
        model.partial_fit(X[:1], [7])
    with pytest.raises(ValueError, match="not those of the first call"):
        model.partial_fit(X, y, classes=[0, 1])


def test_early_stopping():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(80, 5)), rng.integers(3, size=80)  # nothing to learn
    model = SphericalClassifier(early_stopping=True, max_iter=60, n_iter_no_change=3, random_state=0).fit(X, y)
    assert model.n_iter_ == len(model.validation_curve_) < 60


def test_grid_search_of_a_pipeline(iris):
    X, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    pipeline = make_pipeline(MaxAbsScaler(), SphericalClassifier(max_iter=30, batch_size=15, random_state=0))
    search = GridSearchCV(pipeline, {"sphericalclassifier__loss": ["taylor", SphericalSoftmaxLoss(eps=0.1)]}, cv=2)
    assert search.fit(X, names).score(X, names) > 0.9
    assert set(search.predict(X)) == set(names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "'hinge' is not known; use an instance of a Loss or one of taylor"),
        ({"head": "wide"}, "'wide' is not known; use one of auto, dense"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"loss": ["taylor"]}, r"\['taylor'\] is not known"),
        ({"hidden_layer_sizes": 10}, "hidden_layer_sizes is 10, but must be a tuple"),
        ({"hidden_layer_sizes": (10, 0)}, r"hidden_layer_sizes is \(10, 0\)"),
        ({"max_iter": 0}, "max_iter is 0"),
        ({"max_iter": 2.5}, "max_iter is 2.5"),
        ({"early_stopping": True, "n_iter_no_change": -1}, "n_iter_no_change is -1"),
        ({"learning_rate": "auto"}, "learning_rate is 'auto'"),
        ({"tol": math.nan}, "tol is nan"),
        ({"factored_step": 1.5}, "factored_step is 1.5"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
    ],
)
def test_wrong_parameters(iris, options, message):
    with pytest.raises(ValueError, match=message):
        SphericalClassifier(**options).fit(*iris)


def test_gram_head_of_many_classes_is_used_in_fit():
    X, y = topics(400, 200, 1100)
    assert isinstance(SphericalClassifier(max_iter=1, batch_size=128).fit(X, y).head_, GramHead)


def test_remedy_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "spherical_loss.sklearn")
    with pytest.raises(ImportError, match=r"pip install 'spherical-loss\[sklearn\]'"):
        importlib.import_module("spherical_loss.sklearn")


def test_two_classes_with_the_z_loss_are_refused(iris):
    X, y = iris
    with pytest.raises(ValueError, match="no gradient with two classes"):
        SphericalClassifier("z", max_iter=1).fit(X[y < 2], y[y < 2])


@pytest.mark.parametrize("loss", ["taylor", "spherical"])
def test_adaptive_head(loss):
    """It learns frequent and rare classes; its probabilities sum to one, and rank as its predictions do."""
    random = np.random.default_rng(0)
    labels = np.concatenate([np.repeat(np.arange(5), 60), np.repeat(np.arange(5, 12), 12)])
    centres = random.normal(size=(12, 6)) * 3
    X = (centres[labels] + 0.3 * random.normal(size=(len(labels), 6))).astype(np.float32)
    model = SphericalClassifier(loss, head="adaptive", max_iter=60, random_state=0).fit(X, labels + 100)
    assert isinstance(model.head_, AdaptiveSphericalSoftmax)
    assert model.head_.frequent == 6
    assert set(model.head_.order[:5].tolist()) == set(range(5))  # the most frequent ones
    assert model.score(X, labels + 100) > 0.9
    p = model.predict_proba(X)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-4)
    np.testing.assert_array_equal(model.classes_[p.argmax(1)], model.predict(X))
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), p, rtol=1e-4)
    np.testing.assert_array_equal(model.decision_function(X).argmax(1), p.argmax(1))
    again = SphericalClassifier(loss, head="adaptive", random_state=0)
    for _ in range(3):
        again.partial_fit(X, labels, classes=np.arange(20))
    assert again.loss_curve_[-1] < again.loss_curve_[0]


@pytest.mark.parametrize("loss", ["taylor", "spherical"])
def test_tiered_head(loss):
    """It starts at the counts and learns frequent and rare classes, in one tier more than there are decades between them."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), [1200, 3, 5, 5, 40, 40, 3, 3, 8, 8, 8, 8])
    X = (3 * random.normal(size=(12, 6))[labels] + 0.3 * random.normal(size=(len(labels), 6))).astype(np.float32)
    model = SphericalClassifier(loss, head="tiered", max_iter=30, random_state=0).fit(X, labels + 100)
    assert isinstance(model.head_, TieredHead)
    assert [len(tier.V) for tier in model.head_.tiers] == [1, 11]
    assert set(model.head_.order[:3].tolist()) == {0, 4, 5}
    assert model.score(X, labels + 100) > 0.95
    np.testing.assert_array_equal(model.classes_[model.predict_proba(X).argmax(1)], model.predict(X))


@pytest.mark.parametrize("head", ["factored", "tiered"])
@pytest.mark.parametrize("loss", ["taylor", "spherical"])
def test_the_first_step_has_the_suggested_rate(monkeypatch, head, loss):
    """Where the targets follow from the inputs, and with the norms of these rows."""
    random, rates, p = np.random.default_rng(0), [], 1 / np.arange(1, 61) ** 1.5
    X, y = random.normal(size=(600, 6)), random.choice(60, 600, p=p / p.sum())
    model = SphericalClassifier(loss, head=head, hidden_layer_sizes=(), max_iter=1, batch_size=600, random_state=0)

    def step(self, closure=None):
        square = float((((X - X.mean(0)) / X.std(0)) ** 2).sum(1).mean())
        suggested = suggested_lr(self.head, LOSSES[loss](), 600, square, noise=None)
        rates.append((min(group["lr"] for group in self.param_groups), suggested))

    monkeypatch.setattr(TieredSGD if head == "tiered" else FactoredSGD, "step", step)
    model.fit(X, y)
    assert rates[0][0] == pytest.approx(rates[0][1], rel=1e-6)
    assert (head == "tiered") == (len(getattr(model.head_, "tiers", [])) > 1)


def test_adaptive_head_needs_a_likelihood():
    with pytest.raises(ValueError, match=r"needs a likelihood of the family.*use 'taylor' or 'spherical'"):
        SphericalClassifier("z", head="adaptive").fit(np.eye(4), [0, 1, 2, 3])


def several_labels(n: int = 120, D: int = 9, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are sums of the codes of their labels; every tenth row has none."""
    rng = np.random.default_rng(seed)
    Y = (rng.random((n, D)) < 0.25).astype(int)
    Y[::10] = 0
    return Y @ rng.normal(size=(D, 12)) * 2 + 0.1 * rng.normal(size=(n, 12)), Y


HEADS_OF = {  # that take the loss
    "taylor": ("dense", "gram", "factored", "tiered", "adaptive"),
    "spherical": ("dense", "gram", "factored", "tiered", "adaptive"),
    "mse": ("dense", "gram", "factored", "tiered"),
    "softmax": ("dense",),
}


@pytest.mark.parametrize(("loss", "head"), [(loss, head) for loss, heads in HEADS_OF.items() for head in heads])
def test_losses_of_several_true_classes_are_added(loss, head):
    X, Y = several_labels()
    model = SphericalClassifier(loss, head=head, hidden_layer_sizes=(), standardize=False, max_iter=2, random_state=0).fit(X, Y)
    weights = csr_array(Y * np.random.default_rng(1).random(Y.shape))
    made = LOSSES[loss]()
    made.reduction = "none"
    losses = model.network_.losses(X, weights, made).detach()
    each = {"taylor": oracle.quadratic(1, 1, 0.5), "spherical": oracle.quadratic(0.01, 0, 1), "mse": oracle.squared_error(1)}
    if head == "adaptive":
        each_class = -model.head_.log_prob(torch.from_numpy(X))
    else:
        o = torch.from_numpy(X) @ model.head_.weight.detach().T + model.head_.bias.detach()
        each_class = each.get(loss, oracle.softmax)(o)
    expected = (torch.from_numpy(weights.toarray()) * each_class).sum(1)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["dense", "gram", "factored", "tiered", "adaptive"])
def test_an_indicator_matrix_is_learned(head):
    X, Y = several_labels(400)
    dense, sparse = (
        SphericalClassifier(head=head, max_iter=60, batch_size=64, random_state=0).fit(X[:300], y)
        for y in (Y[:300], csr_array(Y[:300]))
    )
    assert dense.classes_.tolist() == list(range(9))
    first, labelled = dense.predict_topk(X[300:], 1)[:, 0], Y[300:].any(1)
    assert Y[300:][np.arange(100), first][labelled].mean() > 0.9  # chance is a quarter
    predicted = dense.predict(X[300:])
    assert (predicted == Y[300:])[labelled].mean() > 0.85
    p = dense.predict_proba(X[300:])
    np.testing.assert_array_equal(predicted, p >= 0.5 * p.max(1, keepdims=True))
    assert dense.decision_function(X[300:]).shape == predicted.shape == (100, 9)
    from_sparse = sparse.predict(X[300:])
    assert issparse(from_sparse)
    np.testing.assert_array_equal(from_sparse.toarray(), predicted)


def test_one_true_class_in_each_row_is_the_same_as_the_class(iris):
    X, y = iris
    options = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}, "max_iter": 3, "random_state": 0}
    sample_weight = np.random.default_rng(0).random(len(y))
    one, matrix = (SphericalClassifier(**options).fit(X, Y, sample_weight) for Y in (y, np.eye(3, dtype=int)[y]))
    np.testing.assert_allclose(one.predict_proba(X), matrix.predict_proba(X), rtol=1e-8)
    np.testing.assert_allclose(one.loss_curve_, matrix.loss_curve_, rtol=1e-8)


@pytest.mark.parametrize("head", ["dense", "factored"])
def test_class_weights_are_those_of_the_examples(iris, head):
    X, y = iris[0][:120], iris[1][:120]  # 50, 50 and 20
    by_class = {"balanced": np.array([40 / 50, 40 / 50, 40 / 20]), "dict": np.array([1.0, 2.0, 5.0])}
    for name, weights in by_class.items():
        given = "balanced" if name == "balanced" else dict(enumerate(weights))
        ours = SphericalClassifier(head=head, class_weight=given, standardize=False, max_iter=4, random_state=0).fit(X, y)
        expected = SphericalClassifier(head=head, standardize=False, max_iter=4, random_state=0).fit(X, y, weights[y])
        np.testing.assert_allclose(ours.predict_proba(X), expected.predict_proba(X), rtol=1e-8)


def test_balanced_weights_of_an_indicator_matrix():
    X, Y = several_labels()
    Y[:, 3] = 0  # never true
    counts = Y.sum(0)
    given = {c: Y.sum() / (8 * counts[c]) if counts[c] else 1.0 for c in range(9)}
    balanced, by_hand = (
        SphericalClassifier(class_weight=w, max_iter=3, random_state=0).fit(X, Y).predict_proba(X) for w in ("balanced", given)
    )
    np.testing.assert_allclose(balanced, by_hand, rtol=1e-8)


def test_partial_fit_of_an_indicator_matrix():
    X, Y = several_labels()
    model = SphericalClassifier(random_state=0)
    for _ in range(5):
        model.partial_fit(X, csr_array(Y))
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    with pytest.raises(ValueError, match="y has 8 columns, but there are 9 classes"):
        model.partial_fit(X, Y[:, :8])
    with pytest.raises(ValueError, match="in some calls of partial_fit"):
        model.partial_fit(X, Y[:, 0])


def test_bad_labels_and_class_weights(iris):
    X, Y = several_labels()
    with pytest.raises(ValueError, match="multiclass-multioutput, but must be one class for each row, or an indicator matrix"):
        SphericalClassifier().fit(X, Y + np.arange(9))
    with pytest.raises(ValueError, match="indicator matrix of 0 and 1"):
        SphericalClassifier().fit(X, 2 * Y)
    with pytest.raises(ValueError, match="does not say how many are true; use predict_topk"):
        SphericalClassifier("z", max_iter=1).fit(X, Y).predict(X)
    with pytest.raises(ValueError, match="class_weight is 'even'"):
        SphericalClassifier(class_weight="even").fit(*iris)
    with pytest.raises(ValueError, match="compute_class_weight"):
        SphericalClassifier(class_weight="balanced").partial_fit(*iris, classes=[0, 1, 2])
