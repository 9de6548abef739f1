"""Pages name what is there: links, anchors, keys, modules and the numbers of a run."""

import pathlib
import re

import pytest

from dllm_jax import config, metrics

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "launch/README.md"]
EACH = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


def anchors(page: pathlib.Path) -> set[str]:
    """Returns what a link to a part of a page may say, as GitHub makes it of headings."""
    text = re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall("^#+ (.*)$", text, flags=re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


def keys(tree, front: str = "") -> set[str]:
    """Returns the dotted names of a configuration's leaves and branches."""
    found = set()
    for name, value in tree.items():
        found.add(front + name)
        if hasattr(value, "items"):
            found |= keys(value, f"{front}{name}.")
    return found


@EACH
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, part = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not part or part in anchors(target), link


@EACH
def test_keys_are_the_configurations(page):
    known = keys(config.default())
    text = page.read_text()
    groups = "|".join(name for name in known if "." not in name)
    named = re.findall(r"--config\.([\w.]+)=", text)
    named += re.findall(rf"`((?:{groups})\.\w[\w.]*)[`=]", text)
    files = {name for name in named if re.search(r"\.(jsonl?|log|py|md)$", name)}
    assert set(named) - files - {"a.b", "KEY"} <= known  # two that stand for any


@EACH
def test_programs_are_there(page):
    for module in re.findall(r"python -m ([\w.]+\w)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        ours = path.parts[len(ROOT.parts)] in ("dllm_jax", "benchmarks", "examples")
        found = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        assert found or not ours, module


def test_each_number_of_a_steps_line_is_told():
    told = (ROOT / "docs" / "pages.md").read_text()
    table = told.partition("## The numbers of a run")[2].partition("\n## ")[0]
    for name, short, _ in metrics.CONSOLE:
        front = name.removeprefix("heldout_").removesuffix("_max")
        assert f"`{name}`" in table or f"`{front}" in table, name
        assert f"`{short.removeprefix('held-out ')}`" in table, short
