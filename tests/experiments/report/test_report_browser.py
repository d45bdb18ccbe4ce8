"""The report in a real Chromium: it works without a network, fits a phone, and can be read in light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from spherical_loss.experiments.results.paper import TABLES
from tests.experiments.report.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


class Opened:
    """The page, and what happened while it opened."""

    def __init__(self, browser: Browser, path: Path, width: int, scheme: str) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        self.page: Page = context.new_page()
        self.page.set_default_timeout(120_000)
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())


@pytest.fixture(scope="module")
def phone(browser: Browser, full_report: Path) -> Opened:
    return Opened(browser, full_report, 390, "light")


@pytest.fixture(scope="module")
def dark(browser: Browser, full_report: Path) -> Opened:
    return Opened(browser, full_report, 1200, "dark")


def test_nothing_to_complain_about_and_nothing_fetched(phone: Opened, full_report: Path) -> None:
    assert phone.messages == []
    assert [url for url in phone.requests if not url.startswith("data:")] == [full_report.as_uri()]


def test_tables_and_pictures_are_seen(phone: Opened) -> None:
    sizes = phone.page.evaluate("[...document.querySelectorAll('svg')].map(x => [x.clientWidth, x.clientHeight])")
    assert len(sizes) > 15
    assert all(width > 250 and height > 100 for width, height in sizes)
    rows = phone.page.evaluate("[...document.querySelectorAll('table')].map(x => x.rows.length)")
    assert len(rows) > len(TABLES)
    assert min(rows) >= 2
    drawn = phone.page.evaluate("[...document.querySelectorAll('svg')].map(x => x.querySelectorAll('path').length)")
    assert min(drawn) > 5


def test_every_picture_has_a_text_alternative(phone: Opened) -> None:
    images = phone.page.get_by_role("img")
    assert images.count() == phone.page.locator("svg").count()
    for text in phone.page.evaluate("[...document.querySelectorAll('svg')].map(x => x.getAttribute('aria-label'))"):
        assert re.search(r"\d", text), text
        assert "Log" in text


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_page(browser: Browser, full_report: Path, width: int) -> None:
    """Neither on a phone nor on a laptop, also with everything unfolded."""
    page = Opened(browser, full_report, width, "light").page
    page.evaluate("document.querySelectorAll('details').forEach(x => x.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = (
        "[...document.querySelectorAll('body *')].filter(x => !x.closest('svg, thead') && x.getBoundingClientRect().right > {})"
    )
    assert page.evaluate(f"{wide.format(width)}.map(x => x.outerHTML.slice(0, 80))") == []
    scrolling = "[...document.querySelectorAll('.scroll')].filter(x => x.scrollWidth > x.clientWidth).map(x => x.ariaLabel)"
    assert page.evaluate(scrolling) == []


def test_on_a_phone_every_cell_has_its_heading(phone: Opened) -> None:
    phone.page.evaluate("document.querySelectorAll('details').forEach(x => x.open = true)")
    headings = phone.page.evaluate(
        "[...document.querySelectorAll('.rows td')].map(x => getComputedStyle(x, '::before').content)"
    )
    assert len(headings) > 100
    assert all(heading not in ("none", '""') for heading in headings)


def test_the_text_of_pictures_can_be_read_on_a_phone(phone: Opened) -> None:
    heights = phone.page.evaluate("[...document.querySelectorAll('svg text')].map(x => x.getBoundingClientRect().height)")
    assert min(height for height in heights if height) > 7


def test_headings_and_contents(phone: Opened) -> None:
    assert phone.page.locator("h1").count() == 1
    levels = phone.page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(x => Number(x.tagName[1]))")
    assert all(after <= before + 1 for before, after in pairwise(levels))
    targets = phone.page.evaluate("[...document.querySelectorAll('nav a')].map(x => x.getAttribute('href'))")
    assert len(targets) == phone.page.locator("main > section").count()
    assert all(phone.page.locator(target).count() == 1 for target in targets)
    ids = phone.page.evaluate("[...document.querySelectorAll('[id]')].map(x => x.id)")
    assert len(ids) == len(set(ids))


def colours(opened: Opened, selector: str) -> list[float]:
    """Contrast, as the Web Content Accessibility Guidelines define it, of the first such element on the page's background."""
    text, paper = (
        opened.page.evaluate("([s, p]) => getComputedStyle(document.querySelector(s))[p]", [s, p])
        for s, p in ((selector, "stroke" if "path" in selector else "color"), ("body", "backgroundColor"))
    )
    light, dim = sorted((luminance(text), luminance(paper)), reverse=True)
    return [luminance(paper), (light + 0.05) / (dim + 0.05)]


def luminance(colour: str) -> float:
    parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


TEXTS = ["p", "a", "td", "figcaption", ".confirmed", ".contradicted", ".undecided"]


@pytest.mark.parametrize("selector", TEXTS)
def test_text_has_contrast_in_light_and_dark(phone: Opened, dark: Opened, selector: str) -> None:
    paper, contrast = colours(phone, selector)
    assert paper > 0.8
    assert contrast >= 4.5
    paper, contrast = colours(dark, selector)
    assert paper < 0.1
    assert contrast >= 4.5


def test_pictures_change_with_the_page(phone: Opened, dark: Opened) -> None:
    lines = (
        "[...new Set([...document.querySelectorAll('svg path')].map(x => getComputedStyle(x).stroke))].filter(x => x != 'none')"
    )
    light, night = phone.page.evaluate(lines), dark.page.evaluate(lines)
    assert len(light) >= 8  # the ink and the losses
    assert not set(light) & set(night)
    for seen, paper in ((light, 1.0), (night, luminance("rgb(20, 23, 26)"))):
        for colour in seen:
            lighter, darker = sorted((luminance(colour), paper), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 3, colour
    fill = "getComputedStyle(document.querySelector('svg text')).fill"
    assert luminance(phone.page.evaluate(fill)) < 0.1
    assert luminance(dark.page.evaluate(fill)) > 0.7
