"""The readers: correct files are read correctly, and errors name a wrong file and the remedy."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spherical_loss.experiments.data import image_files as data
from spherical_loss.experiments.data.folder import VARIABLE, data_folder
from spherical_loss.experiments.errors import UserError
from tests.experiments.conftest import idx_bytes


def test_mnist_reads_what_was_written(small_data: Callable[[str], Path]) -> None:
    folder = small_data("mnist")
    train, test = data.read_mnist(folder)
    assert train.images.shape == (240, 28, 28, 1)
    assert test.images.shape == (60, 28, 28, 1)
    assert train.images.dtype == train.labels.dtype == np.uint8
    raw = gzip.decompress((folder / "mnist/train-images-idx3-ubyte.gz").read_bytes())
    assert train.images.tobytes() == raw[16:]
    assert list(train.labels[:12]) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_mnist_may_be_unpacked(small_data: Callable[[str], Path]) -> None:
    folder = small_data("mnist")
    packed = data.read_mnist.__wrapped__(folder)
    for path in (folder / "mnist").glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    unpacked = data.read_mnist.__wrapped__(folder)
    assert all(np.array_equal(a, b) for p, u in zip(packed, unpacked, strict=True) for a, b in zip(p, u, strict=True))


def test_cifar10_channels_and_labels(small_data: Callable[[str], Path]) -> None:
    folder = small_data("cifar10")
    train, test = data.read_cifar10(folder)
    assert train.images.shape == (100, 32, 32, 3)
    assert len(test.labels) == 20
    record = (folder / "cifar-10-batches-bin/data_batch_2.bin").read_bytes()[:3073]
    assert train.labels[20] == record[0]
    # red, then green, then blue, each row by row
    assert train.images[20, 0, 1, 0] == record[1 + 1]
    assert train.images[20, 1, 0, 1] == record[1 + 1024 + 32]
    assert train.images[20, 31, 31, 2] == record[3072]


def test_cifar100_uses_the_fine_label(small_data: Callable[[str], Path]) -> None:
    train, _ = data.read_cifar100(small_data("cifar100"))
    assert list(train.labels[:3]) == [0, 1, 2]
    assert train.labels.max() == 99


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("mnist", "mnist/t10k-labels-idx1-ubyte.gz"),
        ("cifar10", "cifar-10-batches-bin/data_batch_3.bin"),
        ("cifar100", "cifar-100-binary/test.bin"),
    ],
)
def test_missing_file(small_data: Callable[[str], Path], dataset: str, name: str) -> None:
    folder = small_data(dataset)
    (folder / name).unlink()
    read = {"mnist": data.read_mnist, "cifar10": data.read_cifar10, "cifar100": data.read_cifar100}[dataset]
    with pytest.raises(UserError) as error:
        read(folder)
    assert str(folder / name) in str(error.value)
    assert f"spherical-loss data get {dataset}" in str(error.value)
    assert "SPHERICAL_LOSS_DATA" in str(error.value)


@pytest.mark.parametrize("cut", [0, 1, 10, 200, -1])
def test_truncated_gzip(small_data: Callable[[str], Path], cut: int) -> None:
    folder = small_data("mnist")
    path = folder / "mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz is damaged or truncated.*data get mnist"):
        data.read_mnist(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: b"\0\0\x0d\x03" + raw[4:], "starts with 00 00 0d 03"),
        (lambda raw: raw[:10], "ends within its header"),
        (lambda raw: raw[:-5], "header promises"),
        (lambda raw: raw + b"\0", "header promises"),
        (lambda raw: b"", "starts with nothing"),
        (lambda raw: raw[:4] + struct.pack(">3I", 2**31, 2**31, 4), "header promises 18446744073709551632"),  # 0 in 64 bits
    ],
)
def test_wrong_idx(small_data: Callable[[str], Path], change: Callable[[bytes], bytes], why: str) -> None:
    folder = small_data("mnist")
    path = folder / "mnist/t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
    with pytest.raises(UserError, match=why):
        data.read_mnist(folder)


def test_mnist_labels_are_checked(small_data: Callable[[str], Path]) -> None:
    folder = small_data("mnist")
    path = folder / "mnist/train-labels-idx1-ubyte.gz"
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[8 + 7] = 10
    path.write_bytes(gzip.compress(bytes(raw)))
    with pytest.raises(UserError, match="label 10 of image 7"):
        data.read_mnist(folder)


def test_mnist_counts_are_compared(small_data: Callable[[str], Path]) -> None:
    folder = small_data("mnist")
    (folder / "mnist/train-labels-idx1-ubyte.gz").write_bytes((folder / "mnist/t10k-labels-idx1-ubyte.gz").read_bytes())
    with pytest.raises(UserError, match="60 labels for the 240 images"):
        data.read_mnist(folder)


@pytest.mark.parametrize(
    ("dataset", "name", "images"),
    [
        ("mnist", "mnist/t10k-images-idx3-ubyte.gz", "60 images, not 10,000"),
        ("cifar10", "cifar-10-batches-bin/data_batch_1.bin", "20 images, not 10,000"),
        ("cifar100", "cifar-100-binary/test.bin", "100 images, not 10,000"),
    ],
)
def test_official_files_have_all_their_images(
    small_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, dataset: str, name: str, images: str
) -> None:
    counts = data.COUNTS
    folder = small_data(dataset)
    only = {part: counts[dataset][part] if part in name else few for part, few in data.COUNTS[dataset].items()}
    monkeypatch.setattr(data, "COUNTS", {dataset: only})
    with pytest.raises(UserError, match=rf"{name} is damaged or truncated.*it has {images}"):
        getattr(data, f"read_{dataset}").__wrapped__(folder)


def test_mnist_images_of_another_size(small_data: Callable[[str], Path]) -> None:
    folder = small_data("mnist")
    path = folder / "mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((240, 20, 20)))))
    with pytest.raises(UserError, match="its images are 20 x 20, not 28 x 28"):
        data.read_mnist.__wrapped__(folder)


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_truncated_cifar(small_data: Callable[[str], Path], cut: int) -> None:
    folder = small_data("cifar10")
    path = folder / "cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"test_batch\.bin is damaged or truncated.*records of 3073 bytes"):
        data.read_cifar10(folder)


def test_cifar_labels_are_checked(small_data: Callable[[str], Path]) -> None:
    folder = small_data("cifar10")
    path = folder / "cifar-10-batches-bin/data_batch_5.bin"
    raw = bytearray(path.read_bytes())
    raw[3 * 3073] = 77
    path.write_bytes(bytes(raw))
    with pytest.raises(UserError, match="label 77 of image 3"):
        data.read_cifar10(folder)


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(small_data: Callable[[str], Path], tmp_path: Path) -> None:
    folder = small_data("cifar10")
    (folder / "cifar-10-batches-bin/data_batch_1.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(UserError, match="damaged"):
        data.read_cifar10(folder)
    assert not (tmp_path / "exploded").exists()


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "spherical-loss"
