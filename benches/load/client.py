"""One streamed text completion, as a client sees it: when each piece came, how it ended, and how it was refused.

Text completions because every server has them: the prompt is the same text for all, without a template. Refusals with Retry-After are
waited for, as a client would; that time counts as waiting for the first token.
"""

import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

SILENCE_LIMIT = 300.0  # seconds without a byte, after which an answer is given up
RETRY_LIMIT = 300.0  # seconds in which a refused request is tried again
MOST_RETRY_PAUSE = 30.0  # seconds
SMALL_BUFFER = 4096  # bytes that the system keeps for a client that reads slowly

# How an answer ended.
DONE, CANCELLED, FAILED, BROKEN, UNFINISHED = "done", "cancelled", "failed", "broken off", "unfinished"


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: str
    tokens: int  # to produce; the text's end is ignored
    client: str = "bench"
    priority: str | None = None  # X-Priority, where it is sent
    cancel_after: int | None = None  # pieces, after which the client goes away
    pause: float = 0.0  # seconds between two reads of a slow reader


@dataclass
class Answer:
    """What became of it. Times are of the monotonic clock."""

    sent: float
    times: list = field(default_factory=list)  # of each piece of text
    end: float = 0.0
    outcome: str = BROKEN
    error: str = ""  # a failure's code and message; empty where the server gave none
    refusals: int = 0  # answers with Retry-After before it was taken
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def first(self):
        """Seconds until the first piece, or None."""
        return self.times[0] - self.sent if self.times else None

    @property
    def gaps(self):
        """Seconds between pieces, in their order."""
        return [after - before for before, after in zip(self.times, self.times[1:])]


class Call:
    """A request under way. `close` may be called by any thread: the client goes away."""

    def __init__(self, url, ask):
        self.address = urlsplit(url)
        self.ask = ask
        self.answer = Answer(sent=time.monotonic())
        self.gone = threading.Event()
        self.connection = None

    def start(self):
        """Runs in a thread of its own; `join` waits for its end."""
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        return self

    def join(self):
        self.thread.join()
        return self.answer

    def close(self):
        self.gone.set()
        self.hang_up()

    def run(self):
        answer = self.answer
        try:
            while True:
                pause = self.once()
                if pause is None:
                    break
                answer.refusals += 1
                if time.monotonic() + pause - answer.sent > RETRY_LIMIT:
                    answer.outcome, answer.error = FAILED, "refused for too long"
                    break
                if self.gone.wait(pause):
                    break
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # http.client meets a socket that another thread has closed in several ways.
            if not self.gone.is_set():
                answer.outcome, answer.error = BROKEN, f"{type(error).__name__}: {error}"
        finally:
            if self.gone.is_set():
                answer.outcome = CANCELLED
            answer.end = time.monotonic()
            self.hang_up()
        return answer

    def hang_up(self):
        connection = self.connection
        sock = connection and connection.sock
        if sock:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()

    def once(self):
        """One try. Seconds to wait before the next, or None where there is an answer."""
        ask = self.ask
        body = {"prompt": ask.prompt, "max_tokens": ask.tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json", "X-Client-Id": ask.client, "Connection": "close"}
        if ask.priority:
            headers["X-Priority"] = ask.priority
        self.connection = http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=SILENCE_LIMIT)
        self.connection.connect()
        # The response keeps the socket where the connection lets it go.
        sock = self.connection.sock
        if ask.pause:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        self.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = self.connection.getresponse()
        self.connection.sock = sock
        if response.status != 200:
            return self.refused(response)
        self.read(response)
        return None

    def refused(self, response):
        retry = response.headers.get("Retry-After", "")
        text = response.read().decode(errors="replace")
        if response.status in (429, 503) and retry.isdigit():
            return min(int(retry), MOST_RETRY_PAUSE)
        self.answer.outcome, self.answer.error = FAILED, f"{response.status} {error_of(text)}".strip()
        return None

    def read(self, response):
        answer, ask = self.answer, self.ask
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                answer.outcome = DONE
                return
            event = json.loads(data)
            if "error" in event:
                answer.outcome, answer.error = FAILED, error_of(data)
                return
            self.event(event)
            if ask.cancel_after is not None and len(answer.times) >= ask.cancel_after:
                self.gone.set()
                return
            if ask.pause:
                time.sleep(ask.pause)

    def event(self, event):
        answer = self.answer
        if any(choice.get("text") for choice in event.get("choices") or []):
            answer.times.append(time.monotonic())
        if usage := event.get("usage"):
            answer.prompt_tokens = usage.get("prompt_tokens", 0)
            answer.completion_tokens = usage.get("completion_tokens", 0)
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def error_of(text):
    """Code and message of an error in OpenAI's shape; empty where it says nothing."""
    try:
        error = json.loads(text).get("error") or {}
        return f"{error.get('code') or ''}: {error.get('message') or ''}".strip(": ")
    except (ValueError, AttributeError):
        return ""


def gauges(url):
    """The numbers of /metrics, or None where a server has none of ours."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        lines = response.read().decode(errors="replace").splitlines()
    finally:
        connection.close()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    found = {name: float(value) for name, _, value in pairs if name.startswith("greenroom_")}
    return found if response.status == 200 and found else None
