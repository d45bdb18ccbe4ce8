"""How the site is built: ``make docs``. Nothing is fetched: formulas become MathML here, which browsers draw by themselves."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

import spherical_loss

project = "spherical-loss"
author = copyright = "The spherical-loss authors"
html_title = project

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# Every reference to a name of this library must lead somewhere. Those to torch's names lead nowhere without the internet.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", rf"(?!{spherical_loss.__name__}).*|.*\.AnyHead")]


THIN_SPACE = '<mspace width="0.17em"/>'
BEFORE_FUNCTION = re.compile(r"(</(?:mi|mn|msub|msup|mfrac|mrow)>)(?=\s*<mi[^>]*>\w\w+</mi>\s*<mo>&ApplyFunction;)")
AFTER_FUNCTION = re.compile(r"<mo>&ApplyFunction;</mo>(?!\s*(<mrow>\s*)?<mo[^>]*>\()")
# Browsers take Unicode's mathematical letters for these, which systems without a mathematical font lack; see site.css.
LETTER = re.compile(r"<mi[^>]*>([\w∂])</mi>")
BAR = '<mo stretchy="false" lspace="0" rspace="0">|</mo>'
PLAIN = {
    "<mn>\N{MATHEMATICAL BOLD DIGIT ONE}</mn>": '<mn class="bold">1</mn>',
    "<mi>\N{DOWN TACK}</mi>": '<mi mathvariant="normal">T</mi>',
    "<mo>‖</mo>": f"<mrow>{BAR}{BAR}</mrow>",
}


def mathml(node: nodes.Element, as_block: bool) -> str:
    """A formula, with the spaces that TeX leaves around the names of functions, in characters that every font has."""
    try:
        formula = tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        logging.getLogger(__name__).warning("formula %r: %s", node.astext(), error, location=node)
        return ""
    formula = AFTER_FUNCTION.sub(THIN_SPACE, BEFORE_FUNCTION.sub(rf"\1{THIN_SPACE}", formula))
    formula = LETTER.sub(r'<mi class="letter">\1</mi>', formula)
    for rare, plain in PLAIN.items():
        formula = formula.replace(rare, plain)
    return formula


def inline_math(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def block_math(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
