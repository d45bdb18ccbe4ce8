"""What goes to PyPI: the wheel as the build backend makes it, its version, and what may import what."""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from hatchling.build import build_wheel
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import spherical_loss

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "spherical_loss"
DISTRIBUTIONS = {"faiss": "faiss-cpu", "markdown_it": "markdown-it-py", "sklearn": "scikit-learn"}
"""Where the name to install is not the one to import."""
OPTIONAL = {"perceptron.py", "retrieval.py", "sklearn.py"}
"""Files of the library with an extra of their own. All others, and losses and heads first of all, need torch only."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where a build backend is called
        name = build_wheel(str(folder))
    with zipfile.ZipFile(folder / name) as file:
        yield file


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(path))


def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    files = {str(path.relative_to(ROOT / "src")) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == files
    assert "spherical_loss/py.typed" in files


def test_links_and_pictures_of_the_readme_are_absolute(metadata: Message) -> None:
    repository = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Homepage"]
    page = metadata.get_payload(decode=True).decode()
    links = re.findall(r"\]\((.+?)\)|src=\"(.+?)\"", page)
    inside = [link for pair in links for link in pair if link and not link.startswith(("https://", "#"))]
    assert inside == []
    version = metadata["Version"]
    files = re.findall(rf"{re.escape(repository)}/blob/v{version}/([^)#]+)", page)
    raw = repository.replace("https://github.com", "https://raw.githubusercontent.com")
    pictures = re.findall(rf"{re.escape(raw)}/v{version}/([^)\"]+)", page)
    assert files
    assert pictures
    assert [name for name in files + pictures if not (ROOT / name).exists()] == []


def imported(path: Path) -> set[str]:
    """The top-level names of the modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names - {"spherical_loss", "__main__"} - sys.stdlib_module_names


def test_every_import_is_declared(metadata: Message) -> None:
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    declared = {canonicalize_name(r.name) for r in requirements}
    without_extras = {canonicalize_name(r.name) for r in requirements if r.marker is None}
    for path in PACKAGE.rglob("*.py"):
        names = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in imported(path)}
        assert names <= declared, path
        if path.relative_to(PACKAGE).parts[0] != "experiments" and path.name not in OPTIONAL:
            assert names <= without_extras, path


def test_version(metadata: Message) -> None:
    assert spherical_loss.__version__ == metadata["Version"]
    with pytest.raises(AttributeError, match="has no attribute 'version'"):
        _ = spherical_loss.version


def test_the_library_does_not_import_the_experiments() -> None:
    """The command line alone does, and nothing imports that."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in ("experiments", "__main__.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                assert not any("experiments" in f"{getattr(node, 'module', '')}.{name}" for name in names), path
