"""What there is to run, a line each; `--help` of each tells more.

python -m dllm_jax
"""

import ast
import pathlib
import signal

DOORS = ("data", "train", "eval", "harness", "generate", "trace", "report", "convert")
DOORS += ("config",)


def about(name: str) -> str:
    """Returns the first line of what a command says of itself, which is not imported."""
    here = pathlib.Path(__file__).parent
    file = (
        here / name / "__main__.py" if (here / name).is_dir() else here / f"{name}.py"
    )
    return ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    for door in DOORS:
        print(f"python -m dllm_jax.{door:10}{about(door)}")
