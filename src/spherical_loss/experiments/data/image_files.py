"""Readers of the image files: MNIST's idx format, CIFAR's binary versions, and the digits that scikit-learn brings.

The official files are in ``$SPHERICAL_LOSS_DATA`` (default: the user's cache folder), under the names in their archives:

    mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]
    cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin
    cifar-100-binary/{train,test}.bin

Headers, sizes and labels are checked, and nothing is ever unpickled. Downloads: :mod:`download`.
"""

from __future__ import annotations

import gzip
import math
import zlib
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spherical_loss.experiments.data.folder import VARIABLE
from spherical_loss.experiments.errors import UserError

COUNTS = {  # images of the official files
    "mnist": {"train": 60_000, "t10k": 10_000},
    "cifar10": {"data_batch": 10_000, "test_batch": 10_000},
    "cifar100": {"train": 50_000, "test": 10_000},
}


class Pixels(NamedTuple):
    """Images ``(N, H, W, C)`` and their labels ``(N,)``, both uint8."""

    images: np.ndarray
    labels: np.ndarray

    @staticmethod
    def concatenated(parts: list[Pixels]) -> Pixels:
        return Pixels(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))


class TrainTest(NamedTuple):
    """The official training and test sets."""

    train: Pixels
    test: Pixels


@lru_cache(maxsize=1)  # the runs of one command share it
def read_digits() -> TrainTest:
    """scikit-learn's 1,797 digits of 8 x 8; there is no official test set, so the last fifth is used as one.

    They are read from scikit-learn's file directly, since importing scikit-learn takes two seconds.
    """
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",", dtype=np.uint8)
    images, labels = table[:, :64].reshape(-1, 8, 8, 1), table[:, 64]
    return TrainTest(Pixels(images[:1437], labels[:1437]), Pixels(images[1437:], labels[1437:]))


@lru_cache(maxsize=1)
def read_mnist(folder: Path) -> TrainTest:
    """MNIST: 60,000 + 10,000 grey images of 28 x 28."""
    return TrainTest(*(_read_mnist_part(folder / "mnist", part) for part in ("train", "t10k")))


def _read_mnist_part(folder: Path, part: str) -> Pixels:
    path = _found(folder, f"{part}-images-idx3-ubyte", "mnist")
    images = read_idx(path, 3, "mnist")
    _check_count(path, len(images), "mnist", part)
    if images.shape[1:] != (28, 28):
        raise _damaged(path, f"its images are {images.shape[1]} x {images.shape[2]}, not 28 x 28", "mnist")
    path = _found(folder, f"{part}-labels-idx1-ubyte", "mnist")
    labels = read_idx(path, 1, "mnist")
    if len(images) != len(labels):
        raise _damaged(path, f"it has {len(labels)} labels for the {len(images)} images beside it", "mnist")
    _check_labels(path, labels, 10, "mnist")
    return Pixels(images[..., None], labels)


def _found(folder: Path, name: str, dataset: str) -> Path:
    """The file as distributed (.gz), or unpacked."""
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise _missing(folder / f"{name}.gz", dataset)


def read_idx(path: Path, dimensions: int, dataset: str) -> np.ndarray:
    """The array of an idx file of unsigned bytes, which may be gzipped.

    The format: two zero bytes, 8 for the type (unsigned byte), the number of dimensions, each dimension as a big-endian
    32-bit integer, then the bytes.
    """
    content = _content(path, dataset)
    header = 4 + 4 * dimensions
    expected = bytes([0, 0, 8, dimensions])
    if content[:4] != expected:
        raise _damaged(path, f"it starts with {content[:4].hex(' ') or 'nothing'}, not with {expected.hex(' ')}", dataset)
    if len(content) < header:
        raise _damaged(path, f"it ends within its header, after {len(content)} bytes", dataset)
    shape = [int(n) for n in np.frombuffer(content, ">u4", dimensions, offset=4)]
    size = header + math.prod(shape)
    if len(content) != size:
        raise _damaged(path, f"it has {len(content)} bytes, but its header promises {size} (shape {tuple(shape)})", dataset)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


@lru_cache(maxsize=1)
def read_cifar10(folder: Path) -> TrainTest:
    """CIFAR-10: 50,000 + 10,000 colour images of 32 x 32; a record is the label and 3072 bytes."""
    folder = folder / "cifar-10-batches-bin"
    batches = [read_cifar(folder / f"data_batch_{i}.bin", 1, 10, "cifar10", "data_batch") for i in range(1, 6)]
    return TrainTest(Pixels.concatenated(batches), read_cifar(folder / "test_batch.bin", 1, 10, "cifar10", "test_batch"))


@lru_cache(maxsize=1)
def read_cifar100(folder: Path) -> TrainTest:
    """CIFAR-100: 50,000 + 10,000 colour images of 32 x 32; a record is the coarse label, the fine label and 3072 bytes."""
    folder = folder / "cifar-100-binary"
    return TrainTest(*(read_cifar(folder / f"{part}.bin", 2, 100, "cifar100", part) for part in ("train", "test")))


def read_cifar(path: Path, label_bytes: int, D: int, dataset: str, part: str) -> Pixels:
    """Records of ``label_bytes`` labels, of which the last counts, and 3 x 32 x 32 bytes: red, green, blue, row by row."""
    if not path.is_file():
        raise _missing(path, dataset)
    content = np.frombuffer(path.read_bytes(), np.uint8)
    record = label_bytes + 3072
    if content.size == 0 or content.size % record:
        raise _damaged(path, f"its {content.size} bytes are not a whole number of records of {record} bytes", dataset)
    records = content.reshape(-1, record)
    _check_count(path, len(records), dataset, part)
    labels = records[:, label_bytes - 1].copy()
    _check_labels(path, labels, D, dataset)
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Pixels(np.ascontiguousarray(images), labels)


def _content(path: Path, dataset: str) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, f"it does not unpack ({error})", dataset) from error


def _check_count(path: Path, count: int, dataset: str, part: str) -> None:
    if count != (expected := COUNTS[dataset][part]):
        raise _damaged(path, f"it has {count:,} images, not {expected:,}", dataset)


def _check_labels(path: Path, labels: np.ndarray, D: int, dataset: str) -> None:
    bad = np.flatnonzero(labels >= D)
    if bad.size:
        raise _damaged(path, f"label {labels[bad[0]]} of image {bad[0]} is not a class from 0 to {D - 1}", dataset)


def _missing(path: Path, dataset: str) -> UserError:
    return UserError(
        f"{path} is missing; fetch it with 'spherical-loss data get {dataset}', or point {VARIABLE} to a folder that has "
        f"{path.parent.name}/{path.name}"
    )


def _damaged(path: Path, what: str, dataset: str) -> UserError:
    return UserError(
        f"{path} is damaged or truncated, or not the official file: {what}; delete it and fetch it again with "
        f"'spherical-loss data get {dataset}'"
    )
