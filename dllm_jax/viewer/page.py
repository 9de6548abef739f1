"""A page as one file: its style, its script and its data inside, and nothing loaded.

The files of web/ are written and read as they are; a page names those that it needs. Data
is inert JSON that the script shows as text, never as HTML, and the page's own policy lets no
other script run and nothing be fetched.
"""

import base64
import hashlib
import html
import json
import pathlib

WEB = pathlib.Path(__file__).parent / "web"
TRACE = (
    ("base.css", "trace.css"),
    ("base.js", "replay.js", "trace.js", "versus.js", "show_trace.js"),
)
REPORT = (
    ("base.css", "trace.css", "report.css"),
    ("base.js", "replay.js", "trace.js", "versus.js", "curves.js", "report.js"),
)
# In JSON they are part of strings alone, where an escape means the same.
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(title: str, kind: tuple[tuple, tuple], content: dict) -> str:
    """Returns the page's HTML. kind: TRACE or REPORT; content: JSON-able."""
    style, script = ("".join(map(source, names)) for names in kind)
    template = source("page.html")
    parts = {
        "title": html.escape(title),
        "style_hash": digest(style),
        "script_hash": digest(script),
        "style": style,
        "script": script,
        "data": embedded(content),
    }
    # In one pass: what is put in is not searched for further places.
    first, *rest = template.split("{{")
    filled = [first]
    for piece in rest:
        name, text = piece.split("}}", 1)
        filled += [parts[name], text]
    return "".join(filled)


def source(name: str) -> str:
    """Returns a file of web/."""
    return (WEB / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """Returns how a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(content: dict) -> str:
    """Returns JSON that can stand inside of an HTML script element."""
    text = json.dumps(
        content, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    for char, escape in UNSAFE.items():
        text = text.replace(char, escape)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate becomes "?"
