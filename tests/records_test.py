"""Files of records, of every format and spelling that is read."""

import gzip
import hashlib
import json
import os
import sys
import threading

import pytest

from dllm_jax import records

ROWS = [{"question": "1+1", "answer": "2"}, {"question": "a\u2028b\U0001f600"}]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
TEXTS = {"x.jsonl": "\n".join([*LINES, ""]), "x.json": f"[{', '.join(LINES)}]"}
TEXTS |= {"lines.json": TEXTS["x.jsonl"], "X.JSON": TEXTS["x.json"]}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_spelling_of_the_same_records(tmp_path, name, end, coding, packed):
    content = TEXTS[name].replace("\n", end).encode(coding)
    file = tmp_path / (f"{name}.gz" if packed else name)
    file.write_bytes(gzip.compress(content) if packed else content)
    assert records.records(str(file)) == ROWS


def test_a_pipe_is_read_like_a_file(tmp_path):
    """As --prompts=/dev/stdin, or <(command)."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(TEXTS["x.jsonl"],))
    writer.start()
    sha256 = hashlib.sha256(TEXTS["x.jsonl"].encode()).hexdigest()
    assert records.hashed(str(pipe)) == (ROWS, sha256)
    writer.join()


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="a folder; name a file in it"):
        records.records(str(tmp_path))


def test_escapes_of_whole_characters_are_read(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))  # \\ud83d\\ude00
    assert records.records(str(file)) == ROWS


def test_parquet_is_read_as_json_would_be(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="an extra: parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = str(tmp_path / "x.parquet")
    rows = [{"question": "1", "ids": [1, 2], "turns": [{"role": "user"}], "x": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert records.records(file) == rows
    for value, reason in ((b"1", "bytes"), (float("nan"), "nan")):
        table = pyarrow.Table.from_pylist([{"question": "1", "other": value}])
        parquet.write_table(table, file)
        named = f"x.parquet', record 1, column 'other': .*{reason}.*; leave that column"
        with pytest.raises(ValueError, match=named):
            records.records(file)


def test_floats_of_32_bits_are_read_as_they_were_written(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="an extra: parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array([0.1, 1 / 3, None, 2, 1e-7], pyarrow.float32())
    parquet.write_table(pyarrow.table({"answer": column}), tmp_path / "x.parquet")
    rows = records.records(str(tmp_path / "x.parquet"))
    assert [row["answer"] for row in rows] == [0.1, 0.33333334, None, 2, 1e-7]


def test_parquet_without_its_reader_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="make install EXTRAS=parquet"):
        records.records(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"a": 1}\n\n{"a": 2\n', r"x.jsonl', line 3: not JSON"),
        ("x.jsonl", '{"a": 1}\n[1]\n', "record 2 is not a JSON object"),
        (
            "x.jsonl",
            '{"a": 1}\n{"a": 1, "b": 2, "a": 2}\n',
            "line 2: .*key 'a' stands tw",
        ),
        ("x.jsonl", '{"digits": {"b": 1, "b": 1}}', "key 'b' stands twice"),
        ("x.jsonl", '{"digits": 1, "digits": 2}', "key 'digits' stands twice"),
        ("x.jsonl", '{"a": ' + "1" * 5000 + "}", "a number of thousands of digits"),
        ("x.jsonl", '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}", "too many brackets"),
        ("x.json", '[{"a": 1, "a": 1}]', "key 'a' stands twice"),
        ("x.jsonl", "\n", "it is empty"),
        ("x.json", "[]", "it is empty"),
        ("x.json", '{"a": 1}', "must hold a list of records"),
        ("x.json", '[{"a": 1}', r"x.json': not JSON"),
        ("x.json", '{"a": 1}\n{"a": 1', r"x.json', line 2: not JSON"),
        (
            "x.csv",
            "a,b\n1,2\n",
            "line 1: not JSON .*; .jsonl, .json and .*this .csv to",
        ),
        ("x.csv.gz", "1\n2\n", "record 1 is not .*; .jsonl, .json and .*this .csv to"),
        ("x", "a,b\n", r"line 1: not JSON \(.*\)$"),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        records.records(str(tmp_path / name))


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match="'none.jsonl': no such file"):
        records.records("none.jsonl")


def test_an_answer_that_another_grader_could_not_judge_is_not_known_to_be_right():
    said = {"math": 1.0, "form": None}  # as rollout.Rollouts.judged_n has it
    late = {"reward": 0.0, "graded": False, "rewards": said}
    assert records.right(late) is None and records.reward(late) is None
    assert records.right({"reward": 1.0, "rewards": {"math": 1.0}}) is True
