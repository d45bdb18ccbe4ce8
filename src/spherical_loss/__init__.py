"""Softmax alternatives of the spherical family for PyTorch.

Losses: :mod:`spherical_loss.losses` (modules), :mod:`spherical_loss.functional` (functions). Output layers that never compute
the logits: :mod:`spherical_loss.heads`.
"""

# No import here: until spherical_loss.__main__ runs, Ctrl-C in the command line is Python's own traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from spherical_loss import functional
    from spherical_loss.base import Loss, SphericalLoss
    from spherical_loss.heads import (
        AdaptiveSphericalSoftmax,
        DenseHead,
        FactoredHead,
        FactoredSGD,
        FaissIndex,
        GramHead,
        Head,
        SampledSoftmax,
        TieredHead,
        TieredSGD,
    )
    from spherical_loss.learning_rate import suggested_lr
    from spherical_loss.losses import (
        AbsSoftmaxLoss,
        QuadraticSoftmaxLoss,
        SoftmaxBoundLoss,
        SoftmaxLoss,
        SphericalSoftmaxLoss,
        SquaredErrorLoss,
        TaylorSoftmaxLoss,
        ZLoss,
    )
    from spherical_loss.statistics import Statistics

    __version__: str

__all__ = [
    "AbsSoftmaxLoss",
    "AdaptiveSphericalSoftmax",
    "DenseHead",
    "FactoredHead",
    "FactoredSGD",
    "FaissIndex",
    "GramHead",
    "Head",
    "Loss",
    "QuadraticSoftmaxLoss",
    "SampledSoftmax",
    "SoftmaxBoundLoss",
    "SoftmaxLoss",
    "SphericalLoss",
    "SphericalSoftmaxLoss",
    "SquaredErrorLoss",
    "Statistics",
    "TaylorSoftmaxLoss",
    "TieredHead",
    "TieredSGD",
    "ZLoss",
    "functional",
    "suggested_lr",
]

_MODULES = ("base", "functional", "heads", "learning_rate", "losses", "statistics")


def __getattr__(name: str) -> object:
    """Names are imported at their first use: ``spherical-loss --help`` need not wait for torch."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("spherical-loss")
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in __all__:
        found = (getattr(import_module(f"{__name__}.{module}"), name, None) for module in _MODULES)
        globals()[name] = next(value for value in found if value is not None)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
