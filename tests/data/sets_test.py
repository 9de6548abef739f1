"""Published sets from a local mirror: whole, damaged, missing; and what becomes of records."""

import functools
import gzip
import hashlib
import http.server
import json
import os
import pathlib
import re
import shlex
import threading

import pytest

from dllm_jax import data, records
from dllm_jax.data import sets
from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig
from dllm_jax.rl.rewards import code
from tests import served

# A folder shared/data above this file, as tests/rl/rewards/code_test.py looks for one.
FOLDERS = [x / "shared" / "data" for x in pathlib.Path(__file__).parents]
SHARED = next((x for x in FOLDERS if x.is_dir()), pathlib.Path("shared/data"))
REAL = {  # the real files, where there is a folder of them
    "gsm8k": "gsm8k_test.jsonl",
    "gsm8k_train": "gsm8k_train.jsonl",
    "mbpp": "mbpp.jsonl",
    "countdown_d1": "countdown_cd3_test.jsonl",
    "sudoku_d1": "sudoku_4x4_test.csv",
}


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """Returns a function that puts a file where a mirror has it; the cache is empty."""
    monkeypatch.setenv(sets.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(sets.MIRROR, f"file://{tmp_path}/mirror/")

    def put(url: str, content: bytes) -> pathlib.Path:
        file = tmp_path / "mirror" / url.partition("://")[2]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    return put


def published(rows: list[dict]) -> bytes:
    """Returns records as a .json file."""
    return json.dumps(rows).encode()


AIME = [{"question": f"What is {i}?", "ground_truth_answer": str(i)} for i in range(3)]


def test_a_published_file_that_is_missing_is_named_with_its_command():
    for name, known in (("data/MATH_train.json", "math_train"), ("mbpp.jsonl", "mbpp")):
        with pytest.raises(ValueError, match=f"no such file; .*data get {known} "):
            sets.check(name)
    sets.check("nothing/of/theirs.json")  # whoever reads it says so
    sets.check("runs/pictures/train.jsonl")


def test_a_set_is_downloaded_once_and_its_checksum_is_noted(mirror):
    url = sets.SETS["aime24"].url
    assert url.endswith("Gen-Verse/AIME2024/resolve/main/test/AIME2024.json")
    file = mirror(url, published(AIME))
    kept, count = sets.get("aime24")
    assert count == 3 and kept == sets.place("aime24")
    assert records.records(str(kept))[1] == {"question": "What is 1?", "answer": "1"}
    file.unlink()
    assert sets.get("aime24") == (kept, 3)
    with pytest.raises(
        ValueError, match="is of a file with SHA-256 .*: remove it first"
    ):
        sets.get("aime24", "0" * 64)

    # Gone from the cache, and another upstream: what was noted is what is asked for.
    kept.unlink()
    mirror(url, published(AIME[:2]))
    with pytest.raises(ValueError, match="its SHA-256 is .*, and should be ") as error:
        sets.get("aime24")
    assert "\n" not in str(error.value) and not kept.exists()
    noted = ", as noted at the first download in .*/AIME2024.json.sha256; --sha256=NEW "
    assert re.search(f"{noted}takes this one$", str(error.value))
    now = hashlib.sha256(file.read_bytes()).hexdigest()
    assert sets.get("aime24", now)[1] == sets.get("aime24", now)[1] == 2


@pytest.mark.parametrize("bad", [b"<html>Log in</html>", b"", b"[]", b"[1]"])
def test_a_first_download_without_records_notes_no_checksum(mirror, bad):
    mirror(sets.SETS["aime24"].url, bad)
    with pytest.raises(ValueError, match="dataset .*AIME2024.json'"):
        sets.get("aime24")
    mirror(sets.SETS["aime24"].url, published(AIME))
    assert sets.get("aime24")[1] == 3


def test_a_wrong_checksum_is_refused_and_leaves_nothing(mirror, tmp_path):
    mirror(sets.SETS["gsm8k"].url, b'{"question": "1+1", "answer": "#### 2"}\n')
    with pytest.raises(ValueError, match="3730d312f6e3440559"):
        sets.get("gsm8k")
    left = [x for x in (tmp_path / "cache").rglob("*") if x.is_file()]
    assert left == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"q,a\n\xe9,2\n", "line 2: no UTF-8; save it as UTF-8"),
        (b"q,a\n1,2\n\n1,2,3\n", "line 4: 3 fields, and not 2"),
        (b"q,a\n1\n", "line 2: 1 fields, and not 2"),
        (b"q,q\n1,2\n", "line 1: each column needs a name of its own"),
        (b"", "line 1: each column needs a name of its own"),
        (b'q,a\n1,"2\n', "line 2: unexpected end of data"),
        (b"q,a\n", "it is empty"),
    ],
)
def test_a_csv_file_of_other_shape_names_its_line(text, says, tmp_path):
    file = tmp_path / "x.csv"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=f"x.csv'.* {says}$"):
        sets.of_csv(file)


def test_a_csv_file_may_have_long_texts_of_several_lines(tmp_path):
    file, long = tmp_path / "x.csv", "x" * 200_000
    file.write_bytes(f'\ufeffq,a\r\n{long},"1\r\n2"\r\n\r\n'.encode())
    assert sets.of_csv(file) == [{"q": long, "a": "1\r\n2"}]


def test_over_http_and_without_a_network(mirror, tmp_path, monkeypatch):
    mirror(sets.SETS["aime24"].url, published(AIME))
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "mirror")
    )
    handler.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv(sets.MIRROR, base)
        assert sets.get("aime24")[1] == 3
        with pytest.raises(
            ValueError, match="cannot download .*: File not found; without a"
        ):
            sets.get("livebench")
        server.shutdown()
    with pytest.raises(ValueError, match="cannot download .*refused.*DLLM_DATA_MIRROR"):
        sets.get("livebench")
    monkeypatch.setenv(sets.MIRROR, "ftp://elsewhere")
    with pytest.raises(
        ValueError, match="DLLM_DATA_MIRROR=ftp://elsewhere: needs file"
    ):
        sets.get("livebench")


def test_a_download_that_is_cut_off_is_none(mirror, monkeypatch):
    class Cut(http.server.BaseHTTPRequestHandler):
        """Promises more than it sends."""

        def do_GET(self):
            """Sends a part."""
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"[1, 2")

        def log_message(self, *args):
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cut) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(sets.MIRROR, f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ValueError, match="it ended after 5 of 100 bytes"):
            sets.get("livebench")
        server.shutdown()
    assert not sets.place("livebench").exists()


def test_a_server_may_not_tell_how_long_a_file_is(mirror, monkeypatch):
    class Untold(http.server.BaseHTTPRequestHandler):
        """Ends the connection where the file ends."""

        def do_GET(self):
            """Sends a file."""
            self.send_response(200)
            self.end_headers()
            self.wfile.write(published(AIME))

        def log_message(self, *args):
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Untold) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(sets.MIRROR, f"http://127.0.0.1:{server.server_port}")
        assert sets.get("aime24")[1] == 3
        server.shutdown()


def test_records_that_are_none_are_named(mirror):
    mirror(sets.SETS["livebench"].url, b"[1]")
    with pytest.raises(ValueError, match="record 1 is not a JSON object"):
        sets.get("livebench")
    known = sets.Set("x", "", "math", sets.grade_school)
    bad = mirror("https://x/x.jsonl", b'{"question": "1"}\n')
    with pytest.raises(ValueError, match="record 1: no record of x: KeyError 'answer'"):
        sets.kept_rows("x", known, bad)
    with pytest.raises(ValueError, match="x: 1 records, and not 2"):
        sets.kept_rows("x", sets.Set("x", "", "", count=2), bad)


def test_files_of_the_hub_packed_or_parquet(mirror):
    rows = [{"question": "1+1", "answer": "2"}]
    packed = gzip.compress(json.dumps(rows[0]).encode())
    mirror(sets.HUB.format("mine/sums", "data/one.jsonl.gz"), packed)
    kept, count = sets.get("hub:mine/sums/data/one.jsonl.gz")
    assert count == 1 and records.records(str(kept)) == rows
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = mirror(sets.HUB.format("mine/sums", "two.parquet"), b"")
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    sha = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=f"is {sha}, and should be 0{{64}}$"):
        sets.get("hub:mine/sums/two.parquet", "0" * 64)
    kept, count = sets.get("hub:mine/sums/two.parquet", sha)
    assert kept != sets.get("hub:mine/sums/data/one.jsonl.gz")[0]
    assert records.records(str(kept)) == rows


def test_files_of_the_hub_that_differ_in_their_kind_alone_are_two(mirror):
    texts = {
        ".jsonl": '{"a": 1}',
        ".json": '[{"a": 2}]',
        ".csv": "a\n3",
        "": '{"a": 4}',
    }
    files = {kind: text.encode() for kind, text in texts.items()}
    files |= {".jsonl.gz": gzip.compress(b'{"a": 5}')}
    files |= {".json.gz": gzip.compress(b'[{"a": 6}]')}
    for kind, text in files.items():
        mirror(sets.HUB.format("mine/v1.0", f"d{kind}"), text)
    found = {sets.get(f"hub:mine/v1.0/d{kind}")[0] for kind in files}
    assert {str(records.records(str(file))[0]["a"]) for file in found} == set("123456")


def test_files_of_the_hub_with_names_alike_are_two(mirror):
    names = ("a/b_c/d.jsonl", "a/b/c_d.jsonl", "a/b/c/d.jsonl", "a/b/c+d.jsonl")
    names += ("a/b/d.json", "a/b/d_json.jsonl", "a/b/d=json.jsonl", "a/b/d.json.jsonl")
    for name in names:
        owner, repository, path = name.split("/", 2)
        row = {"name": name}
        text = json.dumps([row] if path == "d.json" else row).encode()
        mirror(sets.HUB.format(f"{owner}/{repository}", path), text)
    for name in names * 2:
        assert records.records(str(sets.get(f"hub:{name}")[0])) == [{"name": name}]


@pytest.mark.parametrize("name", ["a b#c?.jsonl", "a%20b.jsonl"])
def test_a_file_of_the_hub_may_have_any_name(mirror, name):
    """As the hub shows it, or copied from its address."""
    mirror(sets.HUB.format("a/b", name.replace("%20", " ")), b'{"a": 1}')
    kept, count = sets.get(f"hub:a/b/{name}")
    assert count == 1 and " " not in kept.name


def test_a_checksum_is_known_by_its_digits(mirror):
    """In either case of letters; what is none is refused before anything is downloaded."""
    text = b'{"a": 1}'
    mirror(sets.HUB.format("a/b", "c.jsonl"), text)
    for wrong in ("xyz", "ab", "0" * 65):
        with pytest.raises(
            ValueError, match=f"--sha256={wrong}: a SHA-256 has 64 digits"
        ):
            sets.get("hub:a/b/c.jsonl", wrong)
    sha = hashlib.sha256(text).hexdigest().upper()
    assert sets.get("hub:a/b/c.jsonl", sha) == sets.get("hub:a/b/c.jsonl", sha.lower())


def test_a_checksum_that_is_not_the_known_one_is_refused(mirror):
    with pytest.raises(
        ValueError, match="--sha256=0{64}: math500 is known to be of a file"
    ):
        sets.get("math500", "0" * 64)
    known = sets.SETS["math500"].sha256
    mirror(sets.SETS["math500"].url, b"[]")
    with pytest.raises(ValueError, match=f"and should be {known}"):
        sets.get("math500", known)


@pytest.mark.parametrize("name", ["MATH", "hub:owner", "hub:owner/name", "hub:a//b"])
def test_an_unknown_name_lists_what_there_is(name):
    with pytest.raises(ValueError, match="choose from math500, math_train, gsm8k"):
        sets.get(name)


def test_what_was_not_downloaded_says_how_to_get_it(mirror):
    with pytest.raises(ValueError, match="python -m dllm_jax.data get math500"):
        data.problems(str(sets.place("math500")), None, data.DataConfig(), None)


@pytest.mark.parametrize("name", REAL)
def test_the_real_files_have_their_checksums_and_can_be_graded(mirror, name):
    real = SHARED / REAL[name]
    if not real.exists():
        pytest.skip("the real file is not here")
    known = sets.SETS[name]
    mirror(known.url, real.read_bytes())
    kept, count = sets.get(name)
    assert count == known.count
    grader = rewards.grader(known.reward, RewardConfig())
    for row in records.records(str(kept))[:40]:
        grader.check(data.Problem([], row["question"], str(row.get("answer", "")), row))


def test_humaneval_as_it_is_asked():
    prompt = 'def twice(x):\n    """ Doubles. """\n'
    row = {"prompt": prompt, "entry_point": "twice", "test": "def check(c): pass"}
    (got,) = sets.humaneval([row])
    assert got["question"] == f"You need to complete this code:\n{prompt}\n"
    assert got["prefix"] == f"Here is the completed code:\n```python\n{prompt}\n"
    text = got["prefix"] + "    return 2 * x\n```"
    assert code.extract(text) == prompt + "\n    return 2 * x\n"


def test_mbpp_as_it_is_asked():
    row = {
        "task_id": 11,
        "text": "Doubles.",
        "code": "import math \r\ndef twice(x): \r\n  return 2 * x",
        "test_list": ["assert twice(1) == 2"],
    }
    (got,) = sets.mbpp([row, row | {"task_id": 511}])
    assert got["question"] == (
        "Doubles.\nYour code should pass the test:\nassert twice(1) == 2\n"
    )
    assert got["prefix"] == (
        "Here is the completed code:\n```python\nimport math\ndef twice(x): \n"
        '    """ Doubles.\n    """\n\n'
    )


# ---- The command -------------------------------------------------------------------------


def run(*args):
    """Returns the finished command, with this test's cache and mirror."""
    env = {name: os.environ[name] for name in (sets.CACHE, sets.MIRROR)}
    return served.run("dllm_jax.data", [*args], env=env)


def test_the_keys_that_it_prints_are_words_of_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv(sets.CACHE, f"{tmp_path}/my cache")
    monkeypatch.setenv(sets.MIRROR, "")
    done = run("get", "arithmetic", "--count=5")
    assert done.returncode == 0, done.stderr
    file = f"{tmp_path}/my cache/arithmetic-5-seed0.jsonl"
    told = shlex.split(done.stdout) + shlex.split(done.stderr)
    assert {f"--config.data.heldout={file}", f"--config.data.train={file}"} <= {*told}


def test_the_command(tmp_path, mirror):
    mirror(sets.SETS["aime24"].url, published(AIME))
    cached = tmp_path / "cache"
    done = run("get", "aime24")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"3 records: --config.data.heldout={cached}/aime24.jsonl",
        "graded by: --config.rl.reward=math",
    ]
    assert done.stderr.strip() == (
        f"to train on them: --config.data.train={cached}/aime24.jsonl "
        "--config.data.answer=answer"
    )
    done = run("get", "sudoku", "--count=5", "--seed=3")
    assert (
        f"5 records: --config.data.heldout={cached}/sudoku-5-seed3.jsonl" in done.stdout
    )
    assert "math500" in run("list").stdout
    there = f"{cached}/aime24.jsonl"
    refusals = {
        ("get", "nothing"): "unknown data set 'nothing': choose from math500",
        ("get",): "say `list`, `get NAME` or `strengthen IN OUT.jsonl`",
        ("strengthen", "none.jsonl", there): "dataset 'none.jsonl': no such file",
        ("get", "sudoku", "--count=0"): "count",
        (
            "get",
            "aime24",
            "--count=5",
        ): "--count: `get aime24` does not read it; it reads --sha256",
        ("get", "sudoku", "--sha256=ab"): "it reads --count and --seed",
        ("list", "--seed=1"): "it reads no flag",
        (
            "strengthen",
            "a.jsonl",
            "b.jsonl",
            "--count=5",
        ): "it reads --tests and --seed",
        ("get", "livebench"): "cannot download file://",
    }
    for arguments, says in refusals.items():
        done = run(*arguments)
        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
