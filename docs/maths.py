"""A hook of MkDocs: formulas become MathML when the pages are built.

So a page needs no script, and nothing from another host, to show them.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(content: str, **options: Any) -> str:
    """Replace every formula of a page."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match["tag"] == "div" else "inline"
    return convert(html.unescape(match["latex"]).strip(), display=display)
