"""The README and docs/: python blocks run, commands exist, links lead somewhere; the site builds without a warning."""

import contextlib
import inspect
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sphinx.util.inventory import InventoryFile

import spherical_loss
from spherical_loss.experiments import cli
from spherical_loss.heads import checkpoint
from tests.experiments.report.browser import chromium

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")]}
LANGUAGES = {"python", "bash", "text"}
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """The fenced blocks of a page: their language, and what is in them. ``{toctree}`` and the like are Sphinx's."""
    return [(language, text) for language, text in FENCE.findall(PAGES[page]) if not language.startswith("{")]


def commands(page):
    """The commands of the bash blocks, as lists of words."""
    text = "".join(text for language, text in blocks(page) if language == "bash").replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def pages_with(language):
    return [page for page in PAGES if any(found == language for found, _ in blocks(page))]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    assert {language for language, _ in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """From top to bottom, in one namespace. A text block after a python block is what it prints."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace, printed = {}, ""
    for language, text in blocks(page):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(text, page, "exec"), namespace)
            printed = output.getvalue()
        elif language == "text":
            assert_alike(printed, text)


def assert_alike(printed, expected):
    """The same words, and about the same numbers: their last digits depend on the processor, and training enlarges that."""
    got, wanted = re.split(r"[\s,]+", printed.strip()), re.split(r"[\s,]+", expected.strip())
    assert len(got) == len(wanted), printed
    for word, want in zip(got, wanted, strict=True):
        if re.fullmatch(r"-?\d+(\.\d+)?", want):
            assert float(word) == pytest.approx(float(want), rel=0.25, abs=0.02), printed
        else:
            assert word == want, printed


def test_pages_with_code():
    assert {"README.md", "docs/index.md", "docs/guides/your-own-loss.md", "docs/how/bound.md"} <= set(pages_with("python"))
    assert {"README.md", "docs/guides/experiments.md"} <= set(pages_with("bash"))


def exit_code(arguments):
    try:
        return cli.main(arguments)
    except SystemExit as stopped:  # --help, and values of the wrong type
        return stopped.code


@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_are_understood(page, monkeypatch, capsys):
    """The shell parses all; ours are parsed by the real command line, which stops where the work would begin."""
    script = "".join(text for language, text in blocks(page) if language == "bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    monkeypatch.setattr(cli, "do", lambda options, console: None)
    for words in commands(page):
        if "spherical_loss" in words or words[0] == "spherical-loss":
            arguments = words[words.index("spherical_loss") + 1 :] if "spherical_loss" in words else words[1:]
            assert exit_code(arguments) == 0, (words, capsys.readouterr().err)
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif words[:2] == ["python", "-m"]:
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), words
        for word in words:
            if word.endswith(".py"):
                assert (ROOT / word).exists(), words
            if match := re.fullmatch(r"(?:\.|spherical-loss)\[([\w,]+)\]", word):
                extras = (ROOT / "pyproject.toml").read_text()
                assert all(f"\n{extra} = [" in extras for extra in match[1].split(",")), words


def test_a_wrong_command_would_be_found():
    assert exit_code(["compare", "no-such-task"]) == 2
    assert exit_code(["compare", "digits", "--no-such-option"]) == 2
    assert exit_code(["compare", "digits", "--runs", "many"]) == 2


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", PAGES[page])
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert "://" in link or ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page):
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", PAGES[page]):
        assert f"def {name}(" in tests, name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as ``make docs`` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", folder / "doctrees", DOCS, folder / "html"]
    result = subprocess.run(build, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return folder / "html"


def test_the_site_builds_and_needs_nothing_from_elsewhere(site):
    assert (site / "index.html").exists()
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|<link[^>]* href)="(?:https?:)?//[^"]*"', html), page
    assert "<math" in (site / "how" / "bound.html").read_text(encoding="utf-8")


def test_every_page_is_in_the_table_of_contents(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        target = page.relative_to(DOCS).with_suffix(".html").as_posix()
        assert target == "index.html" or f'href="{target}"' in index, target


def test_the_reference_has_every_public_name(site):
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    documented = {name for entries in inventory.values() for name in entries}
    wanted = {*spherical_loss.__all__, *spherical_loss.heads.__all__}
    for module in (spherical_loss.functional, checkpoint):
        own = {name for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}
        wanted |= {f"{module.__name__.removeprefix('spherical_loss.')}.{name}" for name in own if name[0] != "_"}
    wanted |= {"sklearn.SphericalClassifier", "processes.process_group", "processes.end"}
    # A head is documented in its own module, and reached through the package, too.
    assert not {name for name in wanted if not {f"spherical_loss.{name}", f"spherical_loss.heads.{name}"} & documented}


TROUBLES = {
    "wider than the page": "document.documentElement.scrollWidth > innerWidth ? [document.documentElement.scrollWidth] : []",
    "code that is cut off": """[...document.querySelectorAll('pre')].filter(x => x.scrollWidth > x.clientWidth)
        .map(x => x.textContent)""",
    # Of 10 points on paper, 7 pixels remain.
    "small pictures": """[...document.querySelectorAll('article img')].filter(x => x.clientWidth < 0.53 * x.naturalWidth)
        .map(x => x.src)""",
    # Browsers take Unicode's mathematical letters, which only mathematical fonts have, unless told otherwise.
    "rare letters": """[...document.querySelectorAll('mi')].filter(x => /^[\\w∂]$/.test(x.textContent))
        .filter(x => getComputedStyle(x).textTransform != 'none' && !x.hasAttribute('mathvariant')).map(x => x.textContent)""",
    "shortened names": """[...document.querySelectorAll('mi')].filter(x => x.textContent.length > 1).filter(x => {
        const range = document.createRange();
        range.selectNodeContents(x);
        return range.getBoundingClientRect().width < 0.3 * x.textContent.length * parseFloat(getComputedStyle(x).fontSize);
    }).map(x => x.textContent)""",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_site_in_a_browser(site, scheme):
    """On a phone and on a laptop: no page is wider, no code is cut off, pictures and formulas can be read."""
    found = []
    with chromium() as browser:
        page = browser.new_context(viewport={"width": 400, "height": 900}, color_scheme=scheme).new_page()
        page.set_default_timeout(120_000)
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            for width in (1280, 400):
                page.set_viewport_size({"width": width, "height": 900})
                if width == 400 and page.locator("math").count():
                    page.screenshot(full_page=True)  # which lays it out once more
                found += [(path.stem, width, name, what) for name, js in TROUBLES.items() if (what := page.evaluate(js))]
    assert not found
