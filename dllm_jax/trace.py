"""Shows how a diffusion language model wrote its answers: one page, which needs nothing else.

    python -m dllm_jax.trace FILE [FILE2] [-o page.html]

FILE is what `generate --out` or `eval` wrote, a run's samples/step_N.jsonl, or a run's folder:
its newest samples. The page replays each answer in the order in which it was written. With
FILE2, another checkpoint's answers, it shows both side by side wherever their prompts are the
same, and who is ahead by how much. What a model looked at stands beside the question, if it
lies in the folder --images; what a model drew is a grid that fills, beside the picture.
"""

import dataclasses
import pathlib
import sys

from dllm_jax import command_line, folder, records
from dllm_jax.models import hf
from dllm_jax.viewer import album, compare, page, table, traces

OUT = "the page; default: FILE with .html for its ending"
MODEL = "a folder with the tokenizer; default: that of the command that wrote FILE"
IMAGES = "a folder; default: that of the run's data, or of FILE"
SHOWN = 8  # answers in the terminal's table


def content(files: list[traces.File], model: str = "") -> dict:
    """Returns what a page shows of one file of answers, or of two; see web/show_trace.js.

    model: a folder with their tokenizer; "": that of the command that wrote them. Raises
    ValueError for two without a common problem.
    """
    if len(files) == 1:
        return {"files": [shown(files[0], model)], "pairs": None, "summary": None}
    first, second = files
    shared = compare.check_common(first, second)
    summary = compare.summary(first.rows, second.rows, shared)
    # Only what is compared is shown, pair by pair, so that both have as many.
    pairs, notice = traces.some(compare.pairs(shared))
    sides, pictures = [], album.Album()
    for file, numbers in zip(files, zip(*pairs, strict=True), strict=True):
        rows = [file.rows[i] for i in numbers]
        sides.append(shown(dataclasses.replace(file, rows=rows), model, pictures))
    sides[0]["notice"] = notice
    return {
        "files": sides,
        "pairs": [[i, i] for i in range(len(pairs))],
        "summary": summary,
    }


def shown(file: traces.File, model: str, pictures=None) -> dict:
    """Returns a file's answers for the page. model: see `content`; pictures: `traces.packed`."""
    tok, block = traces.tokenizer(model or file.model), file.block
    block = block or block_of(model or file.model)
    return traces.packed(file, tok, block=block, pictures=pictures)


def block_of(model: str) -> int:
    """Returns the block of a checkpoint on this machine; 0 where that is not known."""
    try:
        return hf.read_config(traces.folder_of(model)).block if model else 0
    except (OSError, ValueError):
        return 0


def place_of(file: pathlib.Path) -> pathlib.Path:
    """Returns where the page of a file of answers goes if nobody says it: beside it.

    Raises ValueError where nothing can be written there, and for what has no name of its
    own, as a pipe.
    """
    if not records.has_folder(file):
        raise ValueError(
            f"{file} has no name that its page could take: add -o page.html"
        )
    out = file.with_suffix(".html")
    command_line.check_page(out)
    return out


def main():
    """Parses the command line, writes the page, and prints a table of the first answers."""
    values, paths = command_line.page_arguments(
        sys.argv, "files of answers", OUT, model=MODEL, images=IMAGES
    )
    files = [traces.read(path, values.images) for path in paths]
    made = content(files, values.model)
    out = pathlib.Path(values.out or place_of(files[0].path))
    title = " and ".join(side["name"] for side in made["files"])
    folder.write(out, page.page(f"Trace of {title}", page.TRACE, made))
    for other in files[1:]:
        print(f"answers of {files[0].path}; those of {other.path} are on the page")
    print(table.of_rows(files[0].rows[:SHOWN]))
    print(out)


if __name__ == "__main__":
    options = {"FILE [FILE2]": "answers with their traces", "-o, --out=FILE": OUT}
    options |= {"--model=DIR": MODEL, "--images=DIR": IMAGES}
    lines = "\n".join(f"  {flag:<27} {text}" for flag, text in options.items())
    command_line.entry(main, f"{__doc__}\n{lines}\n")
