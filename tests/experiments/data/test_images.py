"""Splits and batches."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.datasets
import torch

from spherical_loss.experiments.data.image_files import Pixels, TrainTest, read_digits
from spherical_loss.experiments.data.images import split_images
from spherical_loss.experiments.errors import UserError


def numbered(n: int, n_test: int) -> TrainTest:
    """Images that carry their own number in two pixels, so that none can be lost or counted twice."""
    numbers = np.arange(n + n_test)
    images = np.random.default_rng(0).integers(0, 256, (n + n_test, 5, 6, 3)).astype(np.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = numbers % 256, numbers // 256
    labels = (numbers % 10).astype(np.uint8)
    return TrainTest(Pixels(images[:n], labels[:n]), Pixels(images[n:], labels[n:]))


def numbers(part) -> list[int]:
    return [int(a) + 256 * int(b) for a, b in zip(part.images[:, 0, 0, 0], part.images[:, 0, 1, 0], strict=True)]


def test_random_splits_use_every_image_once() -> None:
    splits = split_images(numbered(300, 100), 10, "random", 50, seed=1)
    assert [len(part) for part in splits] == [250, 50, 100]
    assert sorted(n for part in splits for n in numbers(part)) == list(range(400))
    assert all(int(label) == n % 10 for part in splits for n, label in zip(numbers(part), part.labels, strict=True))


def test_random_splits_depend_on_the_seed_alone() -> None:
    first, again, other = (split_images(numbered(300, 100), 10, "random", 50, seed) for seed in (1, 1, 2))
    assert numbers(first.test) == numbers(again.test)
    assert numbers(first.test) != numbers(other.test)


def test_official_split() -> None:
    splits = split_images(numbered(300, 100), 10, "official", 50, seed=3)
    assert numbers(splits.train) == list(range(250))
    assert numbers(splits.valid) == list(range(250, 300))
    assert numbers(splits.test) == list(range(300, 400))


def test_too_few_images() -> None:
    with pytest.raises(UserError, match="30 images"):
        split_images(numbered(20, 10), 10, "random", 20, seed=0)


def test_training_images_are_standardized() -> None:
    train = split_images(numbered(300, 100), 10, "official", 50, seed=0).train
    x, _ = train.batch(torch.arange(250))
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4)


def test_batches_are_channels_last() -> None:
    train = split_images(numbered(300, 100), 10, "official", 50, seed=0, flip=True).train
    for generator in (None, torch.Generator()):
        x, target = train.batch(torch.tensor([4, 2]), generator)
        assert x.shape == (2, 3, 5, 6)
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert target.tolist() == [4, 2]


def test_flips_in_training_only() -> None:
    train = split_images(numbered(300, 100), 10, "official", 50, seed=0, flip=True).train
    rows = torch.arange(200)
    straight, _ = train.batch(rows)
    x, _ = train.batch(rows, torch.Generator().manual_seed(0))
    same = (x == straight).flatten(1).all(1)
    mirrored = (x == straight.flip(3)).flatten(1).all(1)
    assert bool((same ^ mirrored).all())
    assert 60 < int(mirrored.sum()) < 140
    assert torch.equal(train.batch(rows)[0], straight)


def test_digits_are_those_of_scikit_learn() -> None:
    expected, (train, test) = sklearn.datasets.load_digits(), read_digits()
    assert np.array_equal(np.concatenate([train.images, test.images])[..., 0], expected.images)
    assert np.array_equal(np.concatenate([train.labels, test.labels]), expected.target)
    assert len(test.labels) == 360
