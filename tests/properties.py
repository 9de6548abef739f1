"""How many examples hypothesis draws, and how one that fails is told.

Profiles: `test` draws the same few ones at every run of the same source, so that `make test`
does not fail by chance; `soak-short` the same many, and `soak` others at every run. Of other
source it may draw others: hypothesis draws numbers and texts that stand there, too.
"""

import ast
import inspect
import re

import hypothesis
import pytest

EXAMPLES = {"test": 50, "soak-short": 50, "soak": 4000}
for name, count in EXAMPLES.items():
    hypothesis.settings.register_profile(
        name,
        max_examples=count,
        derandomize=name != "soak",
        deadline=None,  # time limits say nothing on a busy machine
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


def examples(share: float) -> hypothesis.settings:
    """Returns the settings of a test that draws so many times what others draw."""
    count = hypothesis.settings.default.max_examples
    return hypothesis.settings(max_examples=max(1, round(share * count)))


def drawn(call: str, names: set[str]) -> dict[str, str]:
    """Returns the arguments of these names as source, from a call as hypothesis tells it."""
    parts = re.split(r"\n    (?=\w+=)|\n\)", re.sub(r"  # or any other.*", "", call))
    pairs = (part.split("=", 1) for part in parts[1:] if "=" in part)
    return {name: value.rstrip(", ") for name, value in pairs if name in names}


def to_add(item, error: BaseException) -> str:
    """Returns the line that makes a failing example one that every later run tries.

    Where its arguments are no literals, it is a line that only this version of hypothesis
    and of the test understand.
    """
    notes = getattr(error, "__notes__", [])
    for note in notes:
        parameters = inspect.signature(item.obj.hypothesis.inner_test).parameters
        values = drawn(note, parameters.keys() - set(item.fixturenames))
        try:
            for value in values.values():
                ast.literal_eval(value)
        except (SyntaxError, ValueError):
            continue
        if values:
            told = ", ".join(f"{name}={value}" for name, value in values.items())
            return f"@hypothesis.example({told})"
    found = re.search(r"@reproduce_failure\(.*\)", "\n".join(notes))
    return f"@hypothesis.{found[0][1:]}" if found else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Tells a failing example as a test to add."""
    report = yield
    if call.excinfo and hasattr(getattr(item, "obj", None), "hypothesis"):
        line = to_add(item, call.excinfo.value)
        place = f"{item.path}, above {item.originalname}"
        report.sections.append((f"a test to add to {place}", line))
    return report


def pytest_collection_modifyitems(items):
    """Marks the tests that hypothesis draws for."""
    for item in items:
        if hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker("property")
