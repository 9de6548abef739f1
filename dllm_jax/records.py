"""Files of records: JSON lines, JSON lists and Parquet, packed or not, as they come.

What cannot be read is one line that names the file, the line or record, and what is wrong.
"""

import collections
import gzip
import hashlib
import json
import pathlib
import re
import zlib

ENDINGS = (".jsonl", ".json", ".parquet", "")  # "": read as .jsonl
OPENED = ("/dev", "/dev/fd", "/proc/self/fd")  # where files are that a shell opened
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON may spell half a character


def records(path: str, what: str = "dataset") -> list[dict]:
    """Reads a .jsonl, .json or .parquet file of records; the first two may be .gz.

    what: how people call it. Raises ValueError naming the file, and the line where one is
    not a JSON object.
    """
    return hashed(path, what)[0]


def made_by(path) -> str:
    """Returns why a path may be missing; "" but of those below runs/, which commands make."""
    if not str(path).startswith("runs/"):
        return ""
    return "; the command that makes it was not run here, or not to its end"


def has_folder(path) -> bool:
    """Returns whether a file is one of its own name, beside which others may be written.

    A pipe is none, nor is what a shell opened for a command, such as /dev/stdin: a file
    may stand behind it, elsewhere.
    """
    file = pathlib.Path(path)
    return file.is_file() and str(file.absolute().parent) not in OPENED


def hashed(path: str, what: str = "dataset") -> tuple[list[dict], str]:
    """Returns the `records` of a file, and the SHA-256 of what they were read from.

    It is read once: a pipe has nothing for a second reader, and a file may change.
    """
    file, named = pathlib.Path(path), f"{what} {path!r}"
    if path and file.is_dir():
        raise ValueError(f"{named}: a folder; name a file in it")
    if not (file.is_file() or file.is_fifo()):  # a pipe: /dev/stdin, <(command)
        raise ValueError(f"{named}: no such file{made_by(path)}")
    kind, hint = pathlib.Path(file.name.lower().removesuffix(".gz")).suffix, ""
    if kind not in ENDINGS and file.is_file():
        hint = f"; .jsonl, .json and .parquet are read: convert this {kind} to one"
    try:
        read = {".json": of_list, ".parquet": of_parquet}.get(kind, of_lines)
        data = content(file)
        rows = read(data)
    except ValueError as error:
        comma = "," if str(error).startswith(("line", "record")) else ":"
        raise ValueError(f"{named}{comma} {error}{hint}") from None
    for number, row in enumerate(rows, 1):
        if type(row) is not dict:
            raise ValueError(f"{named}: record {number} is not a JSON object{hint}")
    if not rows:
        raise ValueError(f"{named}: it is empty")
    return rows, hashlib.sha256(data).hexdigest()


def content(file: pathlib.Path) -> bytes:
    """Returns a file's bytes; raises ValueError where they cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def text(file: pathlib.Path) -> str:
    """Returns a file's text; see `decoded`."""
    return decoded(content(file))


def decoded(data: bytes) -> str:
    """Returns the text of UTF-8, without a byte order mark, unpacked if it is gzip's.

    Raises ValueError naming the line with other bytes.
    """
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        kind = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "no UTF-8"
        raise ValueError(f"line {line}: {kind}; save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot be read: {error}") from None


def of_json(written: str, made=dict):
    """Returns a JSON value; raises ValueError, in a few words, for what is none.

    Nor are NaN, infinities, half of a surrogate pair, more digits than Python reads and
    more levels than it follows. made: makes an object of the pairs of its keys and values.
    """
    try:
        value = json.loads(
            written,
            parse_constant=no_number,
            parse_float=finite,
            object_pairs_hook=made,
        )
        if SURROGATE.search(written):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("not JSON that can be read (too many brackets)") from None
    except UnicodeEncodeError:
        raise ValueError("it has a lone surrogate, half of a character") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    except ValueError as error:
        # Python's own limit, whose message tells of a setting of Python's.
        long = str(error).startswith("Exceeds the limit")
        reason = "a number of thousands of digits" if long else error
        raise ValueError(f"not JSON that can be read ({reason})") from None
    return value


def once(pairs: list[tuple]) -> dict:
    """Returns an object of a record; raises ValueError where a key stands twice.

    Which of the two values is meant nobody can tell. In a checkpoint's files the last one
    counts, as all who read them have it.
    """
    row = dict(pairs)
    if len(row) < len(pairs):
        ((twice, _),) = collections.Counter(x for x, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.60} stands twice")
    return row


def no_number(written: str):
    """Raises ValueError for NaN and infinities, which are no JSON."""
    raise ValueError(f"{written} is no number")


def finite(written: str) -> float:
    """Returns a float; raises ValueError for one beyond what floats hold."""
    value = float(written)
    return value if abs(value) < float("inf") else no_number(written[:20])


def of_list(data: bytes) -> list:
    """Returns the items of a .json file; raises ValueError if it is not one list.

    Nor lines of records, to which many give this name.
    """
    try:
        rows = of_json(decoded(data), once)
    except ValueError as error:
        if "Extra data" in str(error):
            return of_lines(data)
        raise
    if type(rows) is not list:
        raise ValueError("a .json file must hold a list of records")
    return rows


def of_lines(data: bytes) -> list:
    """Returns the items of a .jsonl file; raises ValueError naming a line that is none."""
    rows = []
    # Not splitlines(): a string may hold U+2028 and other breaks of a text.
    for number, line in enumerate(decoded(data).split("\n"), 1):
        if line.strip():
            try:
                rows.append(of_json(line, once))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return rows


def of_parquet(data: bytes) -> list:
    """Returns the rows of a .parquet file, as JSON would hold them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            "Parquet is read by pyarrow: make install EXTRAS=parquet"
        ) from None
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
        for i, kind in enumerate(table.schema.types):
            if kind == pyarrow.float32():  # 0.1, and not 0.10000000149011612
                column = table[i].cast(pyarrow.string()).cast(pyarrow.float64())
                table = table.set_column(i, table.schema.names[i], column)
        rows = table.to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"not Parquet that can be read ({reason})") from None
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"record {number}, column {name!r}: {error}; leave that column out, or "
                    "write it as text, numbers or null"
                ) from None
    return rows


# ---- What the record of an answer says of it ---------------------------------------------


def reward(row: dict) -> float | None:
    """Returns what an answer earned; None where nobody judged it."""
    return row.get("reward") if row.get("graded", True) else None


def right(row: dict) -> bool | None:
    """Returns whether an answer is right; None where nobody judged it.

    Of several graders the first says so, if it could: a weighed sum is not about being right.
    """
    earned, parts = reward(row), row.get("rewards")
    said = parts.values() if isinstance(parts, dict) else ()
    first = next(iter(said), earned)
    return None if earned is None or first is None else first >= 1
