"""Where both compilers are installed (DLLM_NO_SKIP=1), a skipped test has failed.

And the longest tests come first, so that no worker compiles alone at the end.
"""

import os

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turns a skip into a failure."""
    report = yield
    if report.skipped and os.environ.get("DLLM_NO_SKIP"):
        report.outcome, report.longrepr = "failed", f"skipped: {call.excinfo.value}"
    return report


# By what their names have, the longest first.
LONG = ("sdar-8b v5p:2x2x1 update", "canvases_and_windows", "that_looks_fits")
LONG += ("sdar-8b", "the_head", "many_long_rows", "no_worse", "a_long_row", "pages")


def pytest_collection_modifyitems(items):
    """Lets what takes long begin early."""

    def rank(item):
        return next((i for i, x in enumerate(LONG) if x in item.name), len(LONG))

    items.sort(key=rank)
