"""Imports only go down: the floors of the package, read from its syntax trees."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "dllm_jax"
FLOORS = {
    "checks": 0,
    "sharding": 0,
    "metrics": 0,
    "curves": 0,
    "checkpoint": 0,
    "data": 0,
    "memory": 0,
    "pallas_kernels": 1,
    "models": 2,
    "sampling": 3,
    "rl": 4,
    "from_yaml": 4,
    "config": 5,
    "train": 5,
    "eval": 5,
    "generate": 5,
    "convert": 5,
}
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: pathlib.Path) -> set[str]:
    """Returns the rooms of the package (a module or a folder) that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {part[1] for part in parts if part[0] == "dllm_jax" and len(part) > 1}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_or_stay_in_the_room(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        assert not imports(path)
        return
    for other in imports(path):
        down = FLOORS[other] < FLOORS[room]
        # The entries share the assembled configuration.
        assert other == room or down or (FLOORS[room] == 5 and other == "config")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_package_never_imports_torch(path):
    assert "torch" not in {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
