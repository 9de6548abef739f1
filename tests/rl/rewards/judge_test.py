"""Judges: a real server on loopback that is slow, wrong, rate-limited, broken or down."""

import base64
import collections
import contextlib
import http.server
import io
import json
import threading
import time
import types

import jax
import numpy as np
import pytest
from PIL import Image

from dllm_jax import data, exits, images, sharding
from dllm_jax.models import hf
from dllm_jax.models.vision.prompts import Picture, Prompt
from dllm_jax.rl import rewards
from dllm_jax.rl.config import JudgeConfig, RewardConfig
from dllm_jax.rl.rewards import endpoint, judge
from dllm_jax.rl.rewards import lent as checkpoints
from dllm_jax.sampling import state
from tests.models.vision import common, drawers
from tests.rl import lent
from tests.rl.lent import answer

SECRET = "sk-Very-Secret"


class Asked(http.server.BaseHTTPRequestHandler):
    """Answers as its server's `behave` says."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, dict(self.headers), json.loads(body)))
        self.server.behave(self, len(self.server.asked))

    def log_message(self, *_):
        """Says nothing."""

    def say(self, status: int, content: bytes, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def complete(self, text):
        message = {"role": "assistant", "content": text}
        self.say(200, json.dumps({"choices": [{"message": message}]}).encode())


@contextlib.contextmanager
def server(behave):
    """Yields (a URL, the list of what it is asked)."""
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    made.daemon_threads = True
    made.behave, made.asked = behave, []
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}/v1", made.asked
    made.shutdown()
    made.server_close()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(endpoint, "BACKOFF_S", 0.001)


def question(**given):
    known = {"problem": "1+1", "gold": "2", "solution": "It is 2.", "right": True}
    return judge.Question(**(known | given))


def votes(url, questions=1, **cfg):
    """Returns the votes on so many questions."""
    cfg = {"votes": 1, "parallel": 2, "seconds": 5.0, "tries": 2} | cfg
    asked = judge.judge(JudgeConfig(at=url, **cfg))
    asked.begin()
    return asked.votes([question(excerpt=f"part {i}") for i in range(questions)])


def test_an_endpoint_is_asked_in_its_own_words():
    def behave(asked, _):
        text = asked.server.asked[-1][2]["messages"][1]["content"]
        asked.complete(r"\boxed{-1}" if "part 1" in text else r"So \boxed{1}.")

    with server(behave) as (url, asked):
        said = votes(url, 3, votes=2, model="some", temperature=0.3, tokens=77)
    assert said == [[1, 1], [-1, -1], [1, 1]]
    assert len(asked) == 6 and {path for path, _, _ in asked} == {
        "/v1/chat/completions"
    }
    _, headers, body = asked[0]
    assert "Authorization" not in headers
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("some", 0.3, 77)
    assert [m["role"] for m in body["messages"]] == ["system", "user"]


@pytest.mark.parametrize("right", [None, True, False])
def test_of_a_reference_answer_is_spoken_where_there_is_one(right):
    def asked(gold: str) -> str:
        return question(gold=gold, right=right, excerpt="It").messages[1]["content"]

    with_one, line = asked("{2}"), "\nIts reference answer: {2}\n"
    assert line in with_one and "reference" not in asked("")
    assert asked("") == with_one.replace(line, "")
    outcome = {True: "is correct:", False: "is incorrect:", None: "right and complete?"}
    assert outcome[right] in with_one


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1}", 1),
        (r"First \boxed{-1}, no: \boxed{ +1 }", 1),
        (r"\boxed{−1}", -1),
        (r"\boxed{- 1}", -1),
        (r"\boxed{2}", 0),
        (r"\boxed{1", 0),
        ("1", 0),
        ("", 0),
        (None, None),
        (r"<think>\boxed{1}? no:</think> \boxed{-1}", -1.0),
        (r"\boxed{1}</think> it is wrong", 0.0),
        (r"<think>perhaps \boxed{1}, but then", 0.0),  # cut in its thoughts
    ],
)
def test_a_vote_stands_in_a_box(text, expected):
    assert judge.vote(text) == expected


def test_a_busy_endpoint_is_asked_again():
    def behave(asked, count):
        if count <= 3:
            asked.say(429, b"slow down", Retry_After="0.01")
        elif count == 4:
            asked.say(503, b"")
        else:
            asked.complete(r"\boxed{1}")

    with server(behave) as (url, asked):
        assert votes(url, 1, tries=5) == [[1]]
        assert len(asked) == 5
        behaved = endpoint.seconds_of
        assert behaved("3") == 3 and behaved("-1") is None and behaved("nan") is None
        assert (
            behaved("Wed, 21 Oct 2026 07:28:00 GMT") is None and behaved(None) is None
        )


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (lambda asked, _: asked.say(401, SECRET.encode()), "HTTP 401"),
        (lambda asked, _: asked.say(500, b""), "HTTP 500"),
        (lambda asked, _: asked.say(302, b"", Location="/v1/other"), "HTTP 302"),
        (lambda asked, _: asked.say(200, b"<html>"), "what is no chat completion"),
        (lambda asked, _: asked.say(200, b"[" * 10**5), "what is no chat completion"),
        (lambda asked, _: asked.say(200, b'{"choices": []}'), "what is no chat"),
        (lambda asked, _: asked.say(200, b"\xff\xfe"), "what is no chat completion"),
        (lambda asked, _: asked.complete(1), "what is no chat completion"),
        (lambda asked, _: asked.complete(0), "what is no chat completion"),
        (lambda asked, _: asked.complete({"text": "1"}), "what is no chat completion"),
        (lambda asked, _: asked.complete([1]), "what is no chat completion"),
        (
            lambda asked, _: asked.complete([{"type": "text", "text": 1}]),
            "what is no chat completion",
        ),
        (lambda asked, _: asked.wfile.write(b"SSH-2.0-none\r\n"), "BadStatusLine"),
        (lambda asked, _: asked.connection.close(), ""),
    ],
)
def test_what_is_wrong_is_counted_and_said_in_a_line(
    behave, reason, monkeypatch, capsys
):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with server(behave) as (url, asked):
        assert votes(url, 1, key="JUDGE_KEY") == [[None]]
    line = capsys.readouterr().err
    assert reason in line and line.count("\n") == 1
    assert line.startswith("warning: the judge: 1 of 1 questions got no answer (")
    assert SECRET not in line
    assert asked[0][1]["Authorization"] == f"Bearer {SECRET}"
    again = "HTTP 5" in reason or reason in ("BadStatusLine", "")
    assert len(asked) == (2 if again else 1)


def test_an_answer_without_text_is_a_vote_for_nothing():
    with server(lambda asked, _: asked.complete(None)) as (url, _):
        assert votes(url) == [[0.0]]


def test_a_judge_that_mostly_gives_no_verdict_is_told_once(capsys):
    def behave(asked, count):
        asked.complete(r"\boxed{1}" if count <= 3 else "It is fine.")

    with server(behave) as (url, _):
        asked = judge.judge(JudgeConfig(at=url, votes=1, parallel=1))
        assert asked.votes([question()] * 5) == [[1.0]] * 3 + [[0.0]] * 2
        assert capsys.readouterr().err == ""  # fewer than half
        assert (
            asked.votes([question()] * 2) == asked.votes([question()] * 2) == [[0]] * 2
        )
    line = capsys.readouterr().err
    assert r"the judge: 2 of 2 answers have neither \boxed{1} nor \boxed{-1}" in line
    assert line.count("\n") == 1


def test_an_answer_in_parts_is_the_text_of_them():
    parts = [{"type": "text", "text": r"So \box"}, {"type": "image_url"}]
    parts.append({"type": "text", "text": "ed{1}"})
    with server(lambda asked, _: asked.complete(parts)) as (url, _):
        assert votes(url) == [[1.0]]


def drip(asked, _):
    """Writes an answer that never ends, a byte now and then."""
    asked.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
    with contextlib.suppress(OSError):
        while True:
            asked.wfile.write(b" ")
            time.sleep(0.02)


@pytest.mark.parametrize("sent", [0, 10])
def test_an_answer_that_breaks_off_is_asked_for_again(sent):
    def behave(asked, count):
        if count > 1:
            return asked.complete(r"\boxed{1}")
        asked.wfile.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n" + b" " * sent
        )
        asked.connection.close()

    with server(behave) as (url, asked):
        assert votes(url) == [[1.0]] and len(asked) == 2


@pytest.mark.parametrize("behave", [lambda *_: time.sleep(1.5), drip])
def test_a_slow_endpoint_is_given_up(behave, capsys):
    with server(behave) as (url, _):
        assert votes(url, 1, seconds=0.2, tries=1) == [[None]]
    assert "(too late)" in capsys.readouterr().err


def test_an_endpoint_that_is_down_is_not_asked_for_ever(capsys):
    with server(lambda *_: None) as (url, _):
        pass  # and closed
    assert votes(url, 50, parallel=2, tries=1) == [[None]] * 50
    line = capsys.readouterr().err
    assert (
        "50 of 50 questions" in line and "not asked, as those before it failed" in line
    )
    assert "refused" in line


def test_one_reason_is_said_once(capsys):
    said = set()
    for _ in range(3):
        judge.tell(collections.Counter({"HTTP 500": 2}), 4, said)
    judge.tell(collections.Counter(), 4, said)
    assert capsys.readouterr().err.count("\n") == 1


def test_not_more_questions_at_once_than_allowed():
    lock, inside, most = threading.Lock(), 0, 0

    def behave(asked, _):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with lock:
            inside -= 1
        asked.complete(r"\boxed{1}")

    with server(behave) as (url, _):
        votes(url, 12, parallel=3)
    assert 1 < most <= 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"at": "http://"}, "at: no URL such as"),
        ({"at": "ftp://host/v1"}, "at: no URL such as"),
        ({"at": "http://host:x/v1"}, "at: no URL such as"),
        ({"at": "http://host..name/v1"}, "at: no URL such as"),
        ({"at": f"http://{'a' * 64}.name/v1"}, "at: no URL such as"),
        ({"at": f"http://me:{SECRET}@host/v1"}, "a URL with a name, a password"),
        ({"at": f"http://host/v1?key={SECRET}"}, "a URL with a name, a password"),
        ({"at": "http://host/v 1"}, "no blanks"),
        ({"at": "http://host/v1", "key": SECRET}, "key: the NAME of an environment"),
        ({"at": "some/folder", "key": "KEY"}, "key: only an endpoint"),
        ({"at": "some/folder", "images": False}, "images=False: of an endpoint"),
        ({"votes": 0}, "votes=0"),
        ({"seconds": 0.0}, "seconds=0"),
        ({"parallel": 0}, "parallel=0"),
    ],
)
def test_bad_settings_are_refused_and_secrets_not_repeated(bad, message):
    with pytest.raises(ValueError, match=message) as caught:
        JudgeConfig(**bad)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("value", [None, "", "two words", f"{SECRET}\r\nX: y", "ключ"])
def test_a_key_that_is_not_there_is_refused(value, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    asked = judge.judge(JudgeConfig(at="http://localhost:1/v1", key="JUDGE_KEY"))
    with pytest.raises(ValueError, match="JUDGE_KEY.*holds no key") as caught:
        asked.begin()
    assert SECRET not in str(caught.value)


def test_a_key_that_anyone_can_read_on_its_way_is_told(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    for url, lines in (("http://some.host/v1", 2), ("https://some.host/v1", 1)):
        told = judge.judge(JudgeConfig(at=url, key="JUDGE_KEY")).begin()
        told = [line for line in told if "nobody answers" not in line]
        assert len(told) == lines and SECRET not in "".join(told)


def test_a_judge_that_nobody_serves_is_told_before_a_step():
    def behave(asked, _):
        asked.complete("")

    with server(behave) as (url, _):
        assert len(judge.judge(JudgeConfig(at=url)).begin()) == 1
    _, told = judge.judge(JudgeConfig(at=url)).begin()
    assert told.startswith(f"warning: nobody answers at {url} (Connection refused)")


# ---- As a reward -----------------------------------------------------------------------


def test_a_judge_says_what_an_answer_is_worth():
    def behave(asked, _):
        text = asked.server.asked[-1][2]["messages"][1]["content"]
        said = next(x for x in (r"\boxed{1}", r"\boxed{-1}", "?") if f"<{x}>" in text)
        if r"\boxed{1}" in said and len(asked.server.asked) % 2:
            said = r"\boxed{-1}"
        asked.complete(said)

    problem = data.Problem([1], "Who?", "", {})
    with server(behave) as (url, asked):
        cfg = RewardConfig(judge=JudgeConfig(at=url, votes=2, parallel=1))
        grader = rewards.grader("judge", cfg)
        assert not grader.gold and grader.begin()
        texts = [r"<\boxed{1}>", r"<\boxed{-1}>", "<?>"]
        grades = grader.grade(texts, [problem] * 3, None)
    np.testing.assert_array_equal(grades.reward_n, [0.5, 0.0, np.nan])
    assert "Who?" in asked[0][2]["messages"][1]["content"]
    with pytest.raises(ValueError, match="rl.reward='judge' needs reward.judge.at"):
        rewards.grader("judge", RewardConfig())


# ---- Questions about images ------------------------------------------------------------


def seen(file, *sizes) -> tuple:
    """Returns the files of pictures of these sizes, with the marks of their pixels."""
    files = [
        str(common.picture(file / f"{i}.png", size, seed=i))
        for i, size in enumerate(sizes)
    ]
    return tuple((file, images.mark(images.read(file))) for file in files)


def test_an_endpoint_is_shown_the_images(tmp_path, capsys):
    """Of one answer as a whole, and of its chunks; small, each in its place."""
    files = seen(tmp_path, (2500, 900), (20, 16))
    prompt = Prompt([1, 2], tuple(Picture(*file, size=(1, 1)) for file in files))
    problem = data.Problem(prompt, "<image>\nWhat is this, and <image>?", "607", {})
    trace = state.stacked([answer(r"\boxed{607}")])
    with server(lambda asked, _: asked.complete(r"\boxed{1}")) as (url, asked):
        cfg = RewardConfig(
            split="tokens", chunk=100, judge=JudgeConfig(at=url, votes=1)
        )
        grader = rewards.grader("judge", cfg, lent.TOK, looks=True)
        told = [x for x in grader.begin() if "image" in x]
        assert told == ["the judge is shown the images that a question is about"]
        assert grader.grade(["607"], [problem], trace).reward_n == [1.0]
        chunks = grader.steps([r"\boxed{607}"], [problem], trace, np.array([True]))
        assert chunks.verdict_nT[0, 0] == 1 and len(asked) == 2
        for _, _, body in asked:
            *parts, text = body["messages"][1]["content"]
            assert "What is this" in text["text"] and "<image>" not in text["text"]
            sizes = []
            for part in parts:
                url_of = part["image_url"]["url"]
                assert part["type"] == "image_url" and len(url_of) < 3e6
                packed = base64.b64decode(url_of.partition("base64,")[2])
                sizes.append(Image.open(io.BytesIO(packed)).size)
            assert sizes == [(1024, 369), (20, 16)]
        common.picture(tmp_path / "0.png", (8, 8), seed=9)
        endpoint.packed.cache_clear()
        assert np.isnan(grader.grade(["607"], [problem], trace).reward_n).all()
        assert "an image cannot be read, or has changed" in capsys.readouterr().err
        blind = JudgeConfig(at=url, votes=1, images=False)
        grader = rewards.grader("judge", RewardConfig(judge=blind), looks=True)
        assert "the judge is not shown (reward.judge.images)" in grader.begin()[-1]
        grader.grade(["607"], [problem], trace)
        assert "What is this" in asked[-1][2]["messages"][1]["content"]


def test_a_checkpoint_is_shown_images_as_its_own_prompts_are(tmp_path):
    files = seen(tmp_path, (20, 16), (9, 30))
    messages = question(problem="Who?", images=files[:1]).messages
    shown = "the judge is shown the images that a question is about"

    def lender(folder):
        made = checkpoints.Lent(JudgeConfig(at=str(folder), rows=2), looks=True)
        return made, made.begin()[-1]

    coded, line = lender(drawers.folder(tmp_path / "drawer"))
    assert line == shown
    prompt = coded.prompt(messages, files[:1])
    tokens = coded.reader.codec().format.tokens
    assert prompt[:2] == [tokens.mmu, tokens.soi]
    assert tuple((x.file, x.mark) for x in prompt.pictures) == files[:1]
    # Its weights, and a program that reads an image, are in the memory that it asks for.
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        claim = coded.claim(0, slots=16)
        coded.format, alone = None, coded.format
        bare = coded.claim(0, slots=16)
    size = sum(x.nbytes for x in jax.tree.leaves(coded.reader.codec().params))
    assert claim.always == bare.always | {"tokenizer of images": size}
    reading = alone.claim(draws=False).working
    assert claim.working == max(bare.working, reading, key=lambda x: sum(x.values()))
    for given, reason in (
        (files, "it has 2 images, and the model reads one"),
        (((files[0][0], "other"),), "cannot be read, or has changed"),
        (((str(tmp_path / "no.png"), "other"),), "cannot be read, or has changed"),
    ):
        with pytest.raises(endpoint.Failed, match=reason):
            coded.prompt(messages, given)
    for folder in (
        drawers.folder(tmp_path / "no_vq", vq=False),
        lent.ARITHMETIC / "model",
    ):
        blind, line = lender(folder)
        assert line.startswith("the judge is shown no images, but the question's text")
        assert blind.prompt(messages, files) == blind.prompt(messages, ())


def test_a_checkpoint_that_looks_answers_what_it_sees(tmp_path, capsys):
    files = seen(tmp_path, (20, 16), (9, 30))
    cfg = JudgeConfig(
        at=str(common.folder(tmp_path / "looker")),
        votes=1,
        tokens=12,
        prompt=1000,
        rows=2,
        temperature=0.0,
    )
    made = checkpoints.Lent(cfg, looks=True)
    with jax.set_mesh(sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])):
        assert "is shown the images" in made.begin()[-1]
        assert made.claim(0, slots=16).always["its tower and images"] > 0
        asked = [question(problem="Who?", images=(one,)) for one in (*files, files[0])]
        lost = question(images=((str(tmp_path / "lost.png"), "0"),))
        asked = [*asked, question(problem="Who?"), lost]
        texts, reasons = made.answers(
            [x.messages for x in asked], [x.images for x in asked]
        )
    one, other, again, blind, nothing = texts
    assert one == again and len({one, other, blind}) == 3 and nothing is None
    assert dict(reasons) == {endpoint.UNREADABLE: 1}


OWN = """
import numpy as np

from dllm_jax import exits

def halves(questions):
    return [0.5 if q.right else None for q in questions]

def numbers(questions):
    return [0, 0.7, -1, None]

def short(questions):
    return []

def words(questions):
    return ["good"] * len(questions)

def endless(questions):
    return [float("inf")] * len(questions)

def nothing(questions):
    pass

def scalar(questions):
    return np.array(1.0)

def by_number(questions):
    return {i: 1.0 for i, _ in enumerate(questions)}

def different(questions):
    return {1.0 for _ in questions}

def one_by_one(questions):
    for question in questions:
        yield 1.0

def stops(questions):
    yield from (1 / 0 for _ in questions)

def fails(questions):
    raise RuntimeError("no\\nway")


def leaves(questions):
    raise SystemExit(0)


def interrupted(questions):
    raise exits.StoppedAtOnce(75)  # as a handler of signals does, wherever a program is
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_judge.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_may_judge(mine):
    asked = judge.judge(JudgeConfig(at="my_judge:halves"))
    assert asked.votes([question(), question(right=False)]) == [[0.5], [None]]
    assert judge.judge(JudgeConfig(at="my_judge:fails")).votes([]) == []  # not called
    assert judge.judge(JudgeConfig(at="my_judge:one_by_one")).votes([question()]) == [
        [1]
    ]
    unlisted = "scalar", "by_number", "different"
    for name in ("short", "words", "endless", "nothing", *unlisted):
        with pytest.raises(ValueError, match=f"my_judge:{name}' returned no list of 1"):
            judge.judge(JudgeConfig(at=f"my_judge:{name}")).votes([question()])
    raised = r"my_judge:fails' raised RuntimeError: no way \(.*my_judge.py, line \d+\)$"
    with pytest.raises(ValueError, match=raised):
        judge.judge(JudgeConfig(at="my_judge:fails")).votes([question()])
    with pytest.raises(
        ValueError, match=r"stops' raised ZeroDivisionError: .*my_judge"
    ):
        judge.judge(JudgeConfig(at="my_judge:stops")).votes([question()])
    with pytest.raises(ValueError, match="my_judge:leaves' raised SystemExit: 0"):
        judge.judge(JudgeConfig(at="my_judge:leaves")).votes([question()])
    with pytest.raises(exits.StoppedAtOnce):
        judge.judge(JudgeConfig(at="my_judge:interrupted")).votes([question()])
    with pytest.raises(
        ValueError, match="reward.judge.at='my_judge:none': my_judge has"
    ):
        judge.judge(JudgeConfig(at="my_judge:none"))


def test_what_a_function_says_of_answers_is_right_above_0(mine):
    cfg = RewardConfig(judge=JudgeConfig(at="my_judge:numbers"))
    problem = types.SimpleNamespace(text="?", answer="", prompt_ids=[])
    grades = rewards.grader("judge", cfg).grade(["an answer"] * 4, [problem] * 4, None)
    np.testing.assert_array_equal(grades.reward_n, [0, 1, 0, np.nan])


@pytest.mark.parametrize("spec", ["judge", "judge:1,length:0.1", "math"])
def test_a_judge_of_answers_and_of_chunks_is_one(monkeypatch, spec):
    """A checkpoint that is named for both is loaded, and counted, once."""
    made = []

    def one(cfg, *, looks):
        made.append(cfg)
        return judge.Judge(votes=lambda questions: [], begin=lambda: ["one"])

    monkeypatch.setattr(judge, "judge", one)
    cfg = RewardConfig(split="tokens", judge=JudgeConfig(at="DIR"))
    grader = rewards.grader(spec, cfg, types.SimpleNamespace(decode=str))
    assert grader.steps and grader.begin() == ["one"] and len(made) == 1


# ---- A checkpoint ----------------------------------------------------------------------


def test_a_checkpoint_judges_with_the_engine(capsys, one_width):
    """The bundled model knows sums alone: what it says of others' is no verdict."""
    folder = str(lent.ARITHMETIC / "model")
    cfg = JudgeConfig(at=folder, votes=2, tokens=4, prompt=700, rows=1)
    asked = judge.judge(cfg)
    assert not asked.aside
    questions = [question(excerpt="1"), question(excerpt="1" * 700)]
    with jax.set_mesh(sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])):
        line, long = asked.begin()
        assert line == f"judge: the checkpoint {folder}, 2 votes"
        assert "reward.judge.prompt=700 and tokens=4: the judge was made for " in long
        claim = asked.claim(0, slots=16)
        weights = 2 * sum(x.size for x in jax.tree.leaves(hf.load(folder)[1]))
        # Keys and values of a row of 704 slots in each layer, bf16, and some integers.
        pages = 704 * 3 * 2 * (2 * 32) * 2
        assert claim.always["judge"] == weights
        assert pages < claim.always["its rows and pages"] < 1.5 * pages
        assert claim.working["judge"] > 0
        votes = asked.votes(questions)
        assert asked.votes(questions) == votes and asked.votes([]) == []
    assert all(x in (-1.0, 0.0, 1.0) for x in votes[0]) and votes[1] == [None, None]
    said = capsys.readouterr().err
    assert "2 of 4 questions got no answer (longer than reward.judge.prompt" in said


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{{ messages[1].content }}", "leaves out what role='system' says"),
    ],
)
def test_a_checkpoint_that_nobody_can_ask_is_refused_before_a_step(
    tmp_path, template, message
):
    folder = common.folder(tmp_path / "model")
    tok = common.tokenizer()
    tok.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tok.save_pretrained(folder)
    with pytest.raises(ValueError, match=f"reward.judge.at='.*model': .*{message}"):
        judge.judge(JudgeConfig(at=str(folder))).begin()


def test_a_question_that_a_template_does_not_write_ends_no_run(tmp_path):
    folder = common.folder(tmp_path / "model")
    tok = common.tokenizer()
    odd = "{% if 'odd' in messages[1].content %}{{ raise_exception('odd') }}{% endif %}"
    tok.chat_template = odd + common.CHAT
    tok.save_pretrained(folder)
    made = checkpoints.Lent(JudgeConfig(at=str(folder)))
    made.begin()
    assert made.prompt(question().messages, ())
    with pytest.raises(endpoint.Failed, match="its chat template fails: odd"):
        made.prompt(question(problem="How odd?").messages, ())


def test_a_checkpoint_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="'/nowhere' is not a folder"):
        judge.judge(JudgeConfig(at="/nowhere")).begin()
