"""Small files of the official formats, and runs that take a second."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spherical_loss.experiments.data import image_files as data
from spherical_loss.experiments.data.folder import VARIABLE


def idx_bytes(array: np.ndarray) -> bytes:
    """The idx format, written from its description: magic, dimensions, bytes."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def images_and_labels(n: int, shape: tuple[int, ...], D: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright patch whose place tells the class, so that something can be learned."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) % D
    images = random.integers(0, 100, (n, *shape))
    for i, label in enumerate(labels):
        row, column = divmod(int(label) % 16, 4)
        images[i, ..., 6 * row + 2 : 6 * row + 6, 6 * column + 2 : 6 * column + 6] += 150
    return images.astype(np.uint8), labels.astype(np.uint8)


def write_mnist(folder: Path, n: int = 240, n_test: int = 60) -> None:
    (folder / "mnist").mkdir(parents=True)
    for seed, (part, count) in enumerate([("train", n), ("t10k", n_test)]):
        images, labels = images_and_labels(count, (28, 28), 10, seed)
        (folder / "mnist" / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (folder / "mnist" / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))


def write_cifar10(folder: Path, n: int = 20) -> None:
    (folder / "cifar-10-batches-bin").mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        images, labels = images_and_labels(n, (3, 32, 32), 10, seed)
        records = np.concatenate([labels[:, None], images.reshape(n, -1)], 1)
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(records.tobytes())


def write_cifar100(folder: Path, n: int = 200) -> None:
    (folder / "cifar-100-binary").mkdir(parents=True)
    for seed, (name, count) in enumerate([("train", n), ("test", n // 2)]):
        images, fine = images_and_labels(count, (3, 32, 32), 100, seed)
        records = np.concatenate([fine[:, None] // 5, fine[:, None], images.reshape(count, -1)], 1)
        (folder / "cifar-100-binary" / f"{name}.bin").write_bytes(records.tobytes())


SMALL_COUNTS = {
    "mnist": {"train": 240, "t10k": 60},
    "cifar10": {"data_batch": 20, "test_batch": 20},
    "cifar100": {"train": 200, "test": 100},
}
WRITERS = {"mnist": write_mnist, "cifar10": write_cifar10, "cifar100": write_cifar100}


@pytest.fixture
def small_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``small_data("mnist")`` writes small files and points SPHERICAL_LOSS_DATA to them."""
    folder = tmp_path / "data"

    def write(dataset: str) -> Path:
        WRITERS[dataset](folder)
        monkeypatch.setenv(VARIABLE, str(folder))
        monkeypatch.setattr(data, "COUNTS", SMALL_COUNTS)
        return folder

    return write


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small corpora, to which SPHERICAL_LOSS_DATA points."""
    from tests.experiments.small_texts import write_texts  # torch takes a while to import

    write_texts(tmp_path / "data")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def full_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a store with something for every section."""
    from spherical_loss.experiments.report.write_report import write_report  # matplotlib takes a while to import
    from tests.experiments.results.stores import full_store

    results = full_store(tmp_path_factory.mktemp("results"))
    write_report(results, results / "report.html", None)
    return results / "report.html"
