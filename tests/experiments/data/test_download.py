"""Downloads, from a server on this machine: checksum, resume, mirrors, archives."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spherical_loss.experiments import cli
from spherical_loss.experiments.data import download
from spherical_loss.experiments.data import image_files as data
from spherical_loss.experiments.data.download import Download
from spherical_loss.experiments.errors import UserError
from tests.experiments.conftest import SMALL_COUNTS, write_cifar10, write_mnist


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``files``; records the requests; honours Range unless switched off; cuts the connection after ``cut`` bytes."""

    def do_GET(self) -> None:
        server = self.server
        content = server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        asked = self.headers.get("Range")
        server.asked.append((self.path, asked))
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        if begin >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        self.wfile.write(content[begin : begin + server.cut])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.ranges, server.cut = {}, [], True, 1 << 30
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.05))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def offer(server) -> Callable[..., Download]:
    """Puts a file on the server."""

    def put(path: str, content: bytes, members: tuple[str, ...] = ()) -> Download:
        name = "/" + path.rsplit("/", maxsplit=1)[-1]
        server.files[name] = content
        return Download(path, hashlib.sha256(content).hexdigest(), (server.url + name,), members)

    return put


CONTENT = os.urandom(300_000)


def fetch(item: Download, folder: Path) -> list[str]:
    said: list[str] = []
    download.fetch(item, folder, progress=False, say=said.append)
    return said


def test_fetch(offer, tmp_path: Path) -> None:
    fetch(offer("mnist/file.gz", CONTENT), tmp_path)
    assert (tmp_path / "mnist/file.gz").read_bytes() == CONTENT
    assert os.listdir(tmp_path / "mnist") == ["file.gz"]


def test_what_is_there_is_not_fetched_again(offer, server, tmp_path: Path) -> None:
    item = offer("file", CONTENT)
    fetch(item, tmp_path)
    fetch(item, tmp_path)
    assert len(server.asked) == 1


def test_a_download_cut_off_goes_on(offer, server, tmp_path: Path) -> None:
    item = offer("file", CONTENT)
    server.cut = 100_000
    with pytest.raises(UserError, match="could not fetch file"):
        fetch(item, tmp_path)
    part = (tmp_path / "file.part").stat().st_size
    assert 0 < part <= 100_000
    server.cut = 1 << 30
    said = fetch(item, tmp_path)
    assert server.asked[-1] == ("/file", f"bytes={part}-")
    assert said == [f"resuming after {part:,} bytes"]
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert not (tmp_path / "file.part").exists()


def test_a_server_without_ranges_starts_over(offer, server, tmp_path: Path) -> None:
    item = offer("file", CONTENT)
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    server.ranges = False
    fetch(item, tmp_path)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_partial_file_that_is_complete(offer, tmp_path: Path) -> None:
    item = offer("file", CONTENT)
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch(item, tmp_path)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wrong_bytes_are_refused_and_not_kept(offer, tmp_path: Path) -> None:
    item = offer("file", CONTENT)
    (tmp_path / "file.part").write_bytes(b"x" * 1000)  # of something else
    with pytest.raises(UserError, match="hash"):
        fetch(item, tmp_path)
    assert os.listdir(tmp_path) == []
    fetch(item, tmp_path)  # the next one starts from the beginning
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_the_second_mirror_helps_out(offer, server, tmp_path: Path) -> None:
    good = offer("file", CONTENT)
    item = Download("file", good.sha256, (server.url + "/nothing", *good.urls))
    fetch(item, tmp_path)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_no_mirror_answers(server, tmp_path: Path) -> None:
    urls = (server.url + "/a", server.url + "/b")
    with pytest.raises(UserError) as error:
        fetch(Download("file", "0" * 64, urls), tmp_path)
    assert all(url in str(error.value) for url in urls)
    assert "run the same command again" in str(error.value)


def test_mnist_from_the_command_line(offer, tmp_path: Path, monkeypatch, capsys) -> None:
    write_mnist(tmp_path / "source")
    files = sorted((tmp_path / "source/mnist").iterdir())
    monkeypatch.setitem(download.DATASETS, "mnist", tuple(offer(f"mnist/{path.name}", path.read_bytes()) for path in files))
    monkeypatch.setenv("SPHERICAL_LOSS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(data, "COUNTS", SMALL_COUNTS)
    assert cli.main(["data", "get", "mnist"]) == 0
    assert "mnist is complete in" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "data/mnist")) == [path.name for path in files]
    assert cli.main(["data", "get", "mnist", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_archives_are_unpacked(offer, server, tmp_path: Path, monkeypatch) -> None:
    write_cifar10(tmp_path / "source")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(tmp_path / "source/cifar-10-batches-bin", "cifar-10-batches-bin")
    item = offer("cifar-10-binary.tar.gz", buffer.getvalue(), download.DATASETS["cifar10"][0].members)
    monkeypatch.setitem(download.DATASETS, "cifar10", (item,))
    monkeypatch.setenv("SPHERICAL_LOSS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(data, "COUNTS", SMALL_COUNTS)
    for _ in range(2):  # the second time everything is there
        assert cli.main(["data", "get", "cifar10", "--quiet"]) == 0
    assert os.listdir(tmp_path / "data") == ["cifar-10-batches-bin"]
    assert len(os.listdir(tmp_path / "data/cifar-10-batches-bin")) == 6
    assert len(server.asked) == 1


def test_every_file_has_a_checksum_and_an_official_address() -> None:
    hosts = ("https://ossci-datasets.s3.amazonaws.com/", "https://storage.googleapis.com/", "https://www.cs.toronto.edu/")
    for items in download.DATASETS.values():
        for item in items:
            assert len(item.sha256) == 64
            assert all(url.startswith(hosts) for url in item.urls)
