"""What a run leaves for people when it ends: a page and a table of its last samples."""

import pathlib

from dllm_jax import folder
from dllm_jax.exits import warn
from dllm_jax.viewer import page, table, traces


def after_run(run: pathlib.Path, tok, say) -> None:
    """Writes trace.html, the newest samples replayed, and says a table of them.

    run: its folder, which may have no samples: then there is nothing to show. tok: its
    tokenizer. Whatever goes wrong is said and costs nothing else: the export comes after.
    """
    if not any((run / "samples").glob("step_*.jsonl")):
        return
    try:
        file = traces.read(str(run))
        shown = {"files": [traces.packed(file, tok)], "pairs": None, "summary": None}
        made = page.page(f"Trace of {file.name}", page.TRACE, shown)
        folder.write(run / "trace.html", made)
    except Exception as error:  # noqa: BLE001 (as a tokenizer may raise anything)
        warn(f"no page of samples: {error}")
        return
    say(table.of_rows(file.rows[:8]))
    say(f"how they were written: {run / 'trace.html'}")
