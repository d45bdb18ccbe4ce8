"""``spherical-loss data get``: the official files, from their own mirrors, checked by their SHA-256.

pooch downloads, checks and unpacks; an interrupted download resumes where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pooch
import requests

from spherical_loss.experiments.data import image_files as data
from spherical_loss.experiments.data.folder import VARIABLE
from spherical_loss.experiments.errors import UserError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Download:
    """A file to store at ``path`` in the data folder, or, with ``members``, an archive that contains them."""

    path: str
    sha256: str
    urls: tuple[str, ...]
    members: tuple[str, ...] = ()


def _mnist(name: str, sha256: str) -> Download:
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
    return Download(f"mnist/{name}", sha256, tuple(mirror + name for mirror in mirrors))


DATASETS: dict[str, tuple[Download, ...]] = {
    "mnist": (
        _mnist("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        _mnist("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        _mnist("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        _mnist("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "cifar10": (
        Download(
            "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            tuple(f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")),
        ),
    ),
    "cifar100": (
        Download(
            "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
            ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        ),
    ),
}
BY_HAND = {
    "ptb": (
        ("ptb/ptb.train.txt", "ptb/ptb.valid.txt", "ptb/ptb.test.txt"),
        "Penn Treebank belongs to the Linguistic Data Consortium (LDC99T42). The text as T. Mikolov prepared it is in the "
        "folder data of http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    ),
    "one-billion-word": (
        ("one-billion-word",),
        "The One Billion Word benchmark is at http://www.statmt.org/lm-benchmark/; unpack "
        "1-billion-word-language-modeling-benchmark-r13output.tar.gz there, or some of its shards",
    ),
    "imdb": (
        ("imdb/imdb.train.txt", "imdb/imdb.test.txt"),
        "The reviews are at https://ai.stanford.edu/~amaas/data/sentiment/ (aclImdb_v1.tar.gz). Write them one per line: those "
        "of train, unsup included, to imdb.train.txt, and those of test to imdb.test.txt",
    ),
    "simlex": (
        ("SimLex-999/SimLex-999.txt",),
        "SimLex-999 is at https://fh295.github.io/simlex.html (SimLex-999.zip)",
    ),
}
"""Data sets that are not fetched: their files in the data folder, and where to find them."""
READERS: dict[str, Callable[[Path], Any]] = {
    "mnist": data.read_mnist,
    "cifar10": data.read_cifar10,
    "cifar100": data.read_cifar100,
}


def get(dataset: str, folder: Path, progress: bool, say: Say) -> None:
    """Fetch the files of ``dataset`` into ``folder`` and read them once to check them."""
    if dataset in BY_HAND:
        names, where = BY_HAND[dataset]
        if missing := [name for name in names if not (folder / name).exists()]:
            raise UserError(f"{where}; put {' and '.join(missing)} in {folder} ({VARIABLE} names another folder)")
        say(f"{dataset} is in {folder}")
        return
    pooch.get_logger().setLevel("WARNING")  # by default it announces every file, with a hint that does not apply here
    for download in DATASETS[dataset]:
        if download.members and all((folder / member).is_file() for member in download.members):
            continue
        say(f"{download.path} -> {folder}")
        fetch(download, folder, progress, say)
    READERS[dataset].__wrapped__(folder)  # type: ignore[attr-defined]  # not from the cache
    say(f"{dataset} is complete in {folder}")


def fetch(download: Download, folder: Path, progress: bool, say: Say) -> None:
    """Fetch the file from the first mirror that answers with the right bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / download.path
    failures = []
    for url in download.urls:
        try:
            pooch.retrieve(
                url,
                known_hash=f"sha256:{download.sha256}",
                fname=target.name,
                path=target.parent,
                downloader=Resuming(target.with_name(f"{target.name}.part"), progress, say),
                processor=pooch.Untar(list(download.members), extract_dir=os.curdir) if download.members else None,
            )
        except (requests.RequestException, ValueError) as error:  # ValueError: the hash
            failures.append(f"{url}: {error}")
            continue
        if download.members:
            target.unlink()  # the archive has been unpacked
        return
    raise UserError(
        f"could not fetch {download.path}:\n  " + "\n  ".join(failures) + "\n"
        f"check the network and run the same command again (it resumes where it stopped), or put the file into "
        f"{target.parent} yourself"
    )


class Resuming:
    """A downloader for pooch that keeps an unfinished file as ``partial`` and asks the server for the rest next time."""

    def __init__(self, partial: Path, progress: bool, say: Say) -> None:
        self.partial, self.progress, self.say = partial, progress, say

    def __call__(self, url: str, output_file: str, caller: Any) -> None:
        have = self.partial.stat().st_size if self.partial.exists() else 0
        with open(self.partial, "ab") as file:

            def start(response: requests.Response, *_: Any, **__: Any) -> None:
                if response.status_code == 206:
                    self.say(f"resuming after {have:,} bytes")
                elif response.status_code == 200:  # all of it, from the beginning
                    file.truncate(0)

            headers = {"Range": f"bytes={have}-"} if have else {}
            fetcher = pooch.HTTPDownloader(self.progress, chunk_size=1 << 16, headers=headers, hooks={"response": start})
            try:
                fetcher(url, file, caller)
            except requests.HTTPError as error:
                if error.response is None or error.response.status_code != 416:
                    raise
                # 416: there is no more to fetch; pooch compares the hash.
        os.replace(self.partial, output_file)
