"""Reports on a run, or on two side by side: one page, which needs nothing else.

    python -m dllm_jax.report RUN [RUN2] [-o page.html]

RUN is the folder of a run (run.folder), or of an evaluation. The page shows its curves, where
its time went, its evaluations with their intervals (of eval.sweep each setting), answers of its
first and last steps or settings as they were written, what happened on the way, and how its
configuration differs from the defaults, or from RUN2's.
"""

import pathlib
import sys

from dllm_jax import command_line, folder
from dllm_jax.exits import warn
from dllm_jax.viewer import album, compare, page, runs, traces

OUT = "the page; default: report.html in RUN"
IMAGES = "the folder of images; default: that of the run's data"
EVALUATED = "Evaluated answers"


def content(paths: list[str], images: str = "") -> dict:
    """Returns what the page shows of one run or of two.

    images: see `traces.read`. Raises ValueError for a folder that is none of a run.
    """
    told = [runs.told(path) for path in paths]
    shown = samples([pathlib.Path(path) for path in paths], images)
    return {"runs": told, "samples": None, "title": "", "summary": None} | shown


def chosen(folders: list[pathlib.Path]) -> tuple[list[pathlib.Path], str]:
    """Returns (at most two files of answers to replay, what they are).

    Of one run they are those of its first and its last step, or what it evaluated: of
    several settings the first and the last. Of two runs they are the evaluations that both
    folders hold, or else the last step that both have.
    """
    steps = [sorted((path / "samples").glob("step_*.jsonl")) for path in folders]
    evaluated = [path / "eval.jsonl" for path in folders]
    if len(folders) == 1 and steps[0]:
        return ends(steps[0], "step")
    if all(path.is_file() for path in evaluated):
        return evaluated, EVALUATED
    if len(folders) == 1:
        found = [part / "eval.jsonl" for part in runs.parts_of(folders[0])]
        return ends([path for path in found if path.is_file()], "setting")
    both = {path.name for path in steps[0]} & {path.name for path in steps[1]}
    files = [path / "samples" / max(both) for path in folders] if both else []
    return files, "Answers at the last step of both"


def ends(files: list[pathlib.Path], what: str) -> tuple[list[pathlib.Path], str]:
    """Returns (the first and the last of some files, what they are)."""
    found = list(dict.fromkeys((*files[:1], *files[-1:])))
    which = "only" if len(files) == 1 else "first and the last"
    return found, f"Answers of the {which} {what}"


def samples(folders: list[pathlib.Path], images: str) -> dict:
    """Returns what the page shows of `chosen` answers; {} where none can be read.

    "samples": for the replay; "title": what they are; "summary": how two runs' evaluations
    differ.
    """
    files, title = chosen(folders)
    try:
        read = [traces.read(str(path), images) for path in files]
    except ValueError as error:  # such as of an evaluation that has hardly begun
        warn(f"answers are left out: {error}")
        read = []
    if not read:
        return {}
    pictures = album.Album()
    toks = [traces.tokenizer(file.model) for file in read]
    sides = zip(read, toks, strict=True)
    made = {"files": [traces.packed(*x, pictures=pictures) for x in sides]}
    rows = [file.rows for file in read]
    shared = compare.common(*rows) if len(rows) == 2 else []
    evaluated = len(folders) == 2 and title == EVALUATED
    if evaluated and not shared:
        warn(
            "the two evaluations have no problem in common, and no difference is told: "
            + compare.why_apart(*rows)
        )
    # A page holds some of very many answers, and pairs are of all.
    whole = all(len(x) <= traces.MOST for x in rows)
    made["pairs"] = (compare.pairs(shared) or None) if whole else None
    told = compare.summary(*rows, shared) if evaluated and shared else None
    return {"samples": made, "title": title, "summary": told}


def main():
    """Parses the command line and writes the page."""
    values, paths = command_line.page_arguments(
        sys.argv, "folders of runs", OUT, images=IMAGES
    )
    made = content(paths, values.images)
    out = pathlib.Path(values.out or pathlib.Path(paths[0]) / "report.html")
    if not values.out:  # which was checked as it was read
        command_line.check_page(out)
    title = " and ".join(run["name"] for run in made["runs"])
    folder.write(out, page.page(f"Report on {title}", page.REPORT, made))
    print(out)


if __name__ == "__main__":
    options = {"RUN [RUN2]": "folders of runs", "-o, --out=FILE": OUT}
    options["--images=DIR"] = IMAGES
    lines = "\n".join(f"  {flag:<27} {text}" for flag, text in options.items())
    command_line.entry(main, f"{__doc__}\n{lines}\n")
