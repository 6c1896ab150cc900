"""Servers whose prompts outlive a restart, and how they are asked: ours with a cache folder, llama.cpp with its slot saved to a file.

Needs `versus` on the path: what installs and starts servers is there.
"""

import http.client
import json
import os
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from peers import Greenroom, Launch, Llama, NativeLlama
from servers import Server, free_port

HERE = Path(__file__).resolve().parent
SILENCE_LIMIT = 300.0  # seconds without a byte, after which an answer is given up
STOP_LIMIT = 60.0  # seconds until a server that is told to stop must have
STILL = 1.0  # seconds in which nothing was written: all is
STILL_LIMIT = 60.0  # seconds until that must be
SLOT_FILE = "slot.bin"


class KeptGreenroom(Greenroom):
    """This project's server with a folder for its prompts."""

    def __init__(self, binary, folder, gigabytes=4.0, settings=None):
        super().__init__(binary, settings)
        self.folder, self.gigabytes = folder, gigabytes

    def launch(self, model, port, threads, slots, context):
        plain = super().launch(model, port, threads, slots, context)
        command = [*plain.command, "--ctx", context]
        return Launch([*command, "--cache-dir", self.folder, "--cache-ssd-gb", self.gigabytes], plain.environment)

    def state_bytes(self, model):
        """Bytes of state that a token has."""
        said = subprocess.run([self.binary, "inspect", model, "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(said)["details"]["memory"]["kv_per_token"]


class KeptLlama(Llama):
    """llama.cpp's wheel with one slot."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def launch(self, model, port, threads, slots, context):
        return Launch([self.python, HERE / "llama_slots.py", model, port, threads, context, self.folder])


class KeptNativeLlama(NativeLlama):
    """llama-server as a binary: the one that is named, or the one that is compiled for this machine."""

    def __init__(self, folder, server=None):
        self.folder, self.server = folder, server

    def prepare(self, model):
        if self.server is None:
            super().prepare(model)

    def launch(self, model, port, threads, slots, context):
        command = [self.server, "--model", model, "--host", "127.0.0.1", "--port", port, "--jinja", "--log-disable"]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", 1, "--ctx-size", context]
        return Launch([*command, "--slot-save-path", f"{self.folder}/"])


@dataclass
class Reply:
    """What came of a request. Seconds from its sending."""

    first: float | None = None
    whole: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0  # of these from disk, where the server says so
    usage: dict = field(default_factory=dict)

    @property
    def share(self):
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class KeptServer(Server):
    """A running server that may be stopped in order."""

    def __init__(self, peer, model, threads, context):
        port = free_port()
        super().__init__(peer.name, peer.launch(model, port, threads, 1, context), port)

    def ask(self, body):
        """A streamed chat completion; `RuntimeError` where the server refuses it, `OSError` where it goes away."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=SILENCE_LIMIT)
        reply, sent, ended = Reply(), time.monotonic(), False
        try:
            asked = body | {"stream": True, "stream_options": {"include_usage": True}}
            connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{self.name} refuses a request: {response.status} {response.read().decode(errors='replace')[:400]}")
            for line in response:
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    ended = True
                    break
                if data:
                    self.event(reply, json.loads(data), sent)
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if not ended:
            raise ConnectionError("the answer broke off")
        reply.whole = time.monotonic() - sent
        return reply

    def event(self, reply, event, sent):
        if "error" in event:
            raise RuntimeError(f"{self.name} ends an answer: {event['error']}")
        for choice in event.get("choices") or []:
            text = (choice.get("delta") or {}).get("content") or ""
            reply.text += text
            # An answer may end at its first token.
            if reply.first is None and (text or choice.get("finish_reason")):
                reply.first = time.monotonic() - sent
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            reply.usage = usage
            reply.prompt_tokens = usage.get("prompt_tokens", 0)
            reply.cached_tokens = details.get("cached_tokens") or (event.get("timings") or {}).get("cache_n") or 0
            reply.disk_tokens = details.get("ssd_cached_tokens") or 0

    def post(self, path, body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=SILENCE_LIMIT) as answer:
            return json.load(answer)

    def slot(self, action):
        """Saves llama.cpp's slot, or restores it: what it said, and the seconds it took."""
        began = time.monotonic()
        said = self.post(f"/slots/0?action={action}", {"filename": SLOT_FILE})
        return said, time.monotonic() - began

    def metric(self, name):
        """A number of ours."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return next((int(float(line.split()[1])) for line in lines if line.startswith(f"greenroom_{name} ")), 0)

    def all_written(self):
        """Bytes that were written to the folder, once nothing more is."""
        deadline, last, since = time.monotonic() + STILL_LIMIT, -1, time.monotonic()
        while time.monotonic() < deadline:
            now = self.metric("ssd_written_bytes_total")
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > STILL:
                return last
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} still writes after {STILL_LIMIT:.0f} s")

    def stop_in_order(self):
        """Asks it to stop and waits: what is still to be written is."""
        self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{self.name} did not stop within {STOP_LIMIT:.0f} s") from error


def folder_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())


def forget_pages(folder):
    """Has the system drop the folder's files from memory, so that they are read from the disk; nothing where it cannot be told."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in Path(folder).iterdir():
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
