"""A judge behind HTTP: any endpoint of OpenAI's chat completions (vLLM, SGLang, others).

Each question is one POST to URL/chat/completions. What may go wrong there ends no run: time
runs out for a question as a whole, however slowly its answer drips; what is too busy (429),
broken (5xx) or not there is asked again, later each time or when Retry-After says; and where
it fails for as many questions on end as are asked at once, the others of a call are not
asked. Redirects are not followed, and proxies of the environment not used.

A question about images shows them: parts of OpenAI's format before its text, data URIs of at
most images.JUDGED pixels a side.

The key is read from the environment variable that `reward.judge.key` names, and stands in no
file, line or error; nor does what an endpoint writes, which might repeat it.
"""

import collections
import contextlib
import functools
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

from dllm_jax import images

TOP_P = 0.95  # as dLLM-RL samples its judge
BACKOFF_S = 0.5  # before a question is asked a second time; then twice as long
MOST_BYTES = 2**22  # of an answer
CONNECT_S = 5.0  # for a connection, before a run begins
PORTS = {"http": 80, "https": 443}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
UNREADABLE = "an image cannot be read, or has changed"


def parsed(url: str) -> urllib.parse.SplitResult:
    """Returns a URL's parts; raises ValueError for one that is no endpoint's.

    The message does not repeat what might hold a password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_one = parts.port is None or parts.port > 0
        (parts.hostname or "").encode("idna")  # as a connection does: no part is empty
    except ValueError:
        port_is_one = False
    if not port_is_one or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("no URL such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "a URL with a name, a password or a query; a key comes from the environment "
            "variable that reward.judge.key names"
        )
    if not (parts.netloc + parts.path).isascii() or any(map(str.isspace, url)):
        raise ValueError("a URL has ASCII characters alone, and no blanks")
    return parts


class Failed(Exception):
    """A question got no answer; the text says why."""

    def __init__(self, reason: str, again: bool = True, wait_s: float | None = None):
        """again: whether asking again may help; wait_s: how long the endpoint says to wait."""
        super().__init__(reason)
        self.again, self.wait_s = again, wait_s


class Endpoint:
    """Asks many questions, some of them at once. cfg: rl.config.JudgeConfig."""

    def __init__(self, cfg, *, looks: bool = False):
        """looks: whether what is judged may be about images."""
        self.cfg, self.url, self.looks = cfg, parsed(cfg.at), looks
        self.headers = {"Content-Type": "application/json", "Connection": "close"}

    def begin(self) -> list[str]:
        """Reads the key; returns what is to be said of the endpoint.

        Raises ValueError where the environment has no key.
        """
        cfg, lines = self.cfg, []
        if cfg.key:
            key = os.environ.get(cfg.key, "").strip()
            if not key or not (key.isascii() and key.isprintable()) or " " in key:
                raise ValueError(
                    f"reward.judge.key={cfg.key!r}: the environment variable of this name "
                    "holds no key"
                )
            self.headers["Authorization"] = f"Bearer {key}"
            if self.url.scheme == "http" and self.url.hostname not in LOOPBACK:
                lines = [f"warning: {cfg.at} gets the key unencrypted; https hides it"]
        if self.looks:
            is_shown = (
                "is shown" if cfg.images else "is not shown (reward.judge.images)"
            )
            lines.append(f"the judge {is_shown} the images that a question is about")
        if why := self.unreachable():
            lines.append(
                f"warning: nobody answers at {cfg.at} ({why}): is reward.judge.at right, and "
                "the judge up?"
            )
        return [f"judge: {cfg.at}, {cfg.votes} votes", *lines]

    def unreachable(self) -> str:
        """Returns why no connection can be made; "" where one can."""
        port = self.url.port or PORTS[self.url.scheme]
        try:
            socket.create_connection((self.url.hostname, port), CONNECT_S).close()
        except OSError as error:
            return error.strerror or "it takes too long"
        return ""

    def answers(self, conversations: list[list[dict]], files: list[tuple]):
        """Returns (the text that answers each, or None; a Counter of the reasons for None).

        files: of each conversation the images that it is about: Question.images. Texts are
        in the order of the questions.
        """
        streak = Streak(self.cfg.parallel)

        def answer(messages, seen) -> tuple[str | None, str]:
            try:
                if self.cfg.images:
                    messages = showing(messages, seen)
                return self.answer(messages, streak), ""
            except Failed as failure:
                return None, str(failure)

        with ThreadPoolExecutor(self.cfg.parallel) as pool:
            found = list(pool.map(answer, conversations, files))
        reasons = collections.Counter(reason for _, reason in found if reason)
        return [text for text, _ in found], reasons

    def answer(self, messages: list[dict], streak: "Streak") -> str:
        """Returns the text that answers one question, asked again as often as is allowed.

        Raises Failed.
        """
        for attempt in range(self.cfg.tries):
            if streak.broken:
                raise Failed("not asked, as those before it failed", again=False)
            try:
                text = self.asked(messages)
            except Failed as failure:
                last = attempt + 1 == self.cfg.tries
                if last or not failure.again:
                    streak.note(failed=failure.again)
                    raise
                wait_s = failure.wait_s or BACKOFF_S * 2**attempt
                time.sleep(min(wait_s, self.cfg.seconds))
            else:
                streak.note(failed=False)
                return text
        raise AssertionError("the last attempt returns or raises")

    def asked(self, messages: list[dict]) -> str:
        """Returns what the endpoint answers, asked once; raises Failed."""
        cfg = self.cfg
        body = {
            "model": cfg.model,
            "messages": messages,
            "temperature": cfg.temperature,
            "top_p": TOP_P,
            "max_tokens": cfg.tokens,
        }
        response, content = self.post(json.dumps(body).encode())
        if response.status != 200:
            busy = response.status in (408, 429) or response.status >= 500
            wait_s = seconds_of(response.getheader("Retry-After"))
            raise Failed(f"HTTP {response.status}", busy, wait_s)
        try:
            return said(json.loads(content)["choices"][0]["message"]["content"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Failed("what is no chat completion", again=False) from None

    def post(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """Returns (the response, its content); raises Failed."""
        url, seconds = self.url, self.cfg.seconds
        kinds = {
            "http": http.client.HTTPConnection,
            "https": http.client.HTTPSConnection,
        }
        connection = kinds[url.scheme](url.hostname, url.port, timeout=seconds)
        end = time.monotonic() + seconds
        try:
            connection.connect()
            # The connection's own limit is of each wait for a byte.
            watch = threading.Timer(
                max(end - time.monotonic(), 0), hang_up, [connection.sock]
            )
            watch.daemon = True
            watch.start()
            try:
                path = f"{url.path.rstrip('/')}/chat/completions"
                connection.request("POST", path, body, self.headers)
                response = connection.getresponse()
                content = response.read(MOST_BYTES)
                # Less than was promised is read without an error where a size is given.
                if response.length and len(content) < MOST_BYTES:
                    raise http.client.IncompleteRead(content)
            finally:
                watch.cancel()
        except (OSError, http.client.HTTPException) as error:
            late = isinstance(error, TimeoutError) or time.monotonic() >= end
            name = getattr(error, "strerror", None) or type(error).__name__
            raise Failed("too late" if late else str(name)) from None
        finally:
            connection.close()
        if time.monotonic() >= end:
            raise Failed("too late")
        return response, content


def said(content: str | list[dict] | None) -> str:
    """Returns the text of a message, also of one in parts; raises TypeError for no text."""
    if isinstance(content, list):
        content = "".join([x["text"] for x in content if x["type"] == "text"])
    if not isinstance(content, str | None):
        raise TypeError("content is no text")
    return content or ""


def showing(messages: list[dict], files: tuple) -> list[dict]:
    """Returns a conversation whose last turn begins with images.

    files: of each its path, and the mark of its pixels. Raises Failed.
    """
    if not files:
        return messages
    try:
        urls = [packed(file, mark) for file, mark in files]
    except ValueError:
        raise Failed(UNREADABLE, again=False) from None
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    *before, last = messages
    parts.append({"type": "text", "text": last["content"]})
    return [*before, last | {"content": parts}]


@functools.lru_cache(maxsize=64)  # an image is asked about many times on end
def packed(file: str, mark: str) -> str:
    """Returns an image file as a data URI; raises ValueError where its pixels are others."""
    return images.embedded(images.marked(file, mark), images.JUDGED)


def hang_up(sock: socket.socket) -> None:
    """Ends a connection in which another thread waits."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def seconds_of(header: str | None) -> float | None:
    """Returns the seconds of a Retry-After; None where it names none, or a date."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e6 else None


class Streak:
    """Whether so many questions on end have failed that the endpoint is taken to be down."""

    def __init__(self, most: int):
        self.most, self.failed, self.lock = most, 0, threading.Lock()

    def note(self, *, failed: bool) -> None:
        """Counts a question that failed, or begins anew."""
        with self.lock:
            self.failed = self.failed + 1 if failed else 0

    @property
    def broken(self) -> bool:
        """Whether others need not be asked."""
        return self.failed >= self.most
