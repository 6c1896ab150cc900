"""Speech on this machine: a clip's time beside faster-whisper's, live text's delays, memory, and what a long recording does to chats.

Each scenario starts its own server. faster-whisper is measured where `--peer-python` names an interpreter that has it
(`python3 -m venv V && V/bin/pip install faster-whisper`), in turns with ours, with as many threads, on the same CTranslate2 folder.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "load"))
from client import Ask, Call  # noqa: E402
from figures import quantile, rows  # noqa: E402

ROOT = pathlib.Path(__file__).parent.parent.parent
CLIPS = ROOT / "tests/data/audio"
WAV_HEADER = 44  # bytes of the test clips'
SECOND = 32_000  # bytes of 16-bit samples at 16 kHz
CHATS = 4


class Server:
    """Greenroom on a free port, ended with the block."""

    def __init__(self, binary, *arguments):
        command = [binary, "serve", *arguments, "--device", "cpu", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.url = None
        for line in self.process.stdout:
            if line.startswith("address"):
                self.url = line.split()[1]
            if line.startswith("ready"):
                return
        raise RuntimeError("the server did not get ready")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def call(self, method, path, body=b"", kind="application/octet-stream"):
        request = urllib.request.Request(self.url + path, body if method == "POST" else None, {"Content-Type": kind}, method=method)
        with urllib.request.urlopen(request) as response:
            text = response.read()
        return json.loads(text) if text else None

    def transcribe(self, audio, **fields):
        """Seconds and text of a recording."""
        parts = [("file\"; filename=\"clip", audio), *((name, str(value).encode()) for name, value in fields.items())]
        body = b"".join(b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value) for name, value in parts)
        begun = time.monotonic()
        heard = self.call("POST", "/v1/audio/transcriptions", body + b"--x--\r\n", "multipart/form-data; boundary=x")
        return time.monotonic() - begun, heard["text"]

    def resident_mib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024


PEER = """
import sys, time
from faster_whisper import WhisperModel
folder, clip, threads = sys.argv[1:4]
models = {kind: WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=int(threads)) for kind in ("int8", "float32")}
for line in sys.stdin:
    begun = time.monotonic()
    segments, _ = models[line.strip()].transcribe(clip, beam_size=1, language="en", vad_filter=False)
    text = "".join(segment.text for segment in segments)
    print(time.monotonic() - begun, flush=True)
"""


def speed(options):
    """A clip, ours and the peer's in turns."""
    clip = CLIPS / "jfk.wav"
    audio, seconds = clip.read_bytes(), (clip.stat().st_size - WAV_HEADER) / SECOND
    times = {"Greenroom": []}
    peer = None
    if options.peer_python:
        folder = options.speech_folder
        peer = subprocess.Popen(
            [options.peer_python, "-c", PEER, folder, str(clip), str(options.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        times |= {"int8": [], "float32": []}
    with Server(options.binary, options.speech_folder, "--threads", str(options.threads)) as server:
        for turn in range(options.rounds + 1):
            for name, values in times.items():
                if name == "Greenroom":
                    took, _ = server.transcribe(audio, vad="false", language="en")
                else:
                    print(name, file=peer.stdin, flush=True)
                    took = float(peer.stdout.readline())
                # The first of each brings the model in.
                if turn:
                    values.append(took)
    if peer:
        peer.stdin.close()
    ours = statistics.median(times["Greenroom"])
    lines = [["", "seconds", "x real time", "ours better by"]]
    for name, values in times.items():
        median = statistics.median(values)
        lines.append([name if name == "Greenroom" else f"faster-whisper {name}", f"{median:.3f}", seconds / median, median / ours])
    return lines


def dictation(options):
    """Audio as fast as it is spoken: when text comes."""
    audio = (CLIPS / "jfk.wav").read_bytes()[WAV_HEADER:] + bytes(2 * SECOND)
    firsts, finals, commits = [], [], []
    with Server(options.binary, options.speech_folder, "--threads", str(options.threads)) as server:
        server.transcribe((CLIPS / "jfk.wav").read_bytes())
        for _ in range(options.rounds):
            session = f"/v1/audio/sessions/{server.call('POST', '/v1/audio/sessions', b'{}', 'application/json')['id']}"
            begun = time.monotonic()
            events = []

            def listen():
                with urllib.request.urlopen(server.url + session + "/events") as stream:
                    for line in stream:
                        if line.startswith(b"data: "):
                            events.append((time.monotonic() - begun, json.loads(line[6:])))

            listener = threading.Thread(target=listen)
            listener.start()
            for at in range(0, len(audio), SECOND // 4):
                due = begun + at / SECOND + 0.25
                time.sleep(max(0.0, due - time.monotonic()))
                server.call("POST", session + "/audio", audio[at : at + SECOND // 4])
            server.call("POST", session + "/finish")
            listener.join()
            for started in (body for _, body in events if body["type"] == "speech.started"):
                of = [(when, body) for when, body in events if body.get("utterance") == started["utterance"]]
                partials = [(when, body) for when, body in of if body["type"] == "transcript.partial"]
                text = next((when for when, body in partials if body["committed"] or body["tentative"]), None)
                if text is not None:
                    firsts.append(text - started["start"])
                commits += [when - body["audio_s"] for when, body in partials]
                stop = next(body["end"] for _, body in of if body["type"] == "speech.stopped")
                finals.append(next(when for when, body in of if body["type"] == "transcript.final") - stop)
    lines = [["seconds", "median", "p90"]]
    for name, values in [
        ("first text behind the utterance's begin", firsts),
        ("text behind the audio it was heard from", commits),
        ("final text behind the utterance's end", finals),
    ]:
        lines.append([name, f"{quantile(values, 0.5):.2f}", f"{quantile(values, 0.9):.2f}"])
    return lines


def memory(options):
    """Resident memory of a server with speech alone."""
    lines = [["", "MiB"]]
    with Server(options.binary, options.speech_folder) as server:
        lines.append(["before the first recording", server.resident_mib()])
        most = 0.0
        done = threading.Event()

        def watch():
            nonlocal most
            while not done.wait(0.02):
                most = max(most, server.resident_mib())

        watcher = threading.Thread(target=watch)
        watcher.start()
        server.transcribe((CLIPS / "long-60s.wav").read_bytes())
        done.set()
        watcher.join()
        lines += [["at most, a minute of speech", most], ["loaded, at rest", server.resident_mib()]]
        server.call("POST", "/admin/transcription/unload")
        time.sleep(1)
        lines.append(["after unloading", server.resident_mib()])
    return lines


def chat(options):
    """Four chats, without and with a long recording beside them."""
    minute = (CLIPS / "long-60s.wav").read_bytes()
    samples = minute[WAV_HEADER:] * options.minutes
    size = len(samples)
    header = minute[:4] + (size + 36).to_bytes(4, "little") + minute[8:40] + size.to_bytes(4, "little")
    recording = header + samples

    def chats(server, running):
        """Gaps between pieces of four endless chats."""
        gaps = []

        def one(number):
            while running():
                answer = Call(server.url, Ask(f"Chat {number}. A long story about the sea and a lighthouse:", 400, client=f"c{number}")).run()
                gaps.extend(answer.gaps)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(CHATS)]
        for thread in threads:
            thread.start()
        return threads, gaps

    with Server(options.binary, "demo", "--speech-model", options.speech_folder, "--threads", str(options.threads)) as server:
        server.transcribe((CLIPS / "jfk.wav").read_bytes())
        alone, _ = server.transcribe(recording)
        end = time.monotonic() + options.seconds
        threads, quiet = chats(server, lambda: time.monotonic() < end)
        for thread in threads:
            thread.join()
        busy = True
        threads, loud = chats(server, lambda: busy)
        time.sleep(2)
        loud.clear()
        beside, _ = server.transcribe(recording)
        heard = list(loud)
        busy = False
        for thread in threads:
            thread.join()
    lines = [["", "alone", "together", "ratio"]]
    for name, share in [("gap p50, ms", 0.5), ("gap p99, ms", 0.99)]:
        a, b = (1e3 * quantile(values, share) for values in (quiet, heard))
        lines.append([name, a, b, b / a])
    audio_s = size / SECOND
    lines.append([f"recording of {options.minutes} min, s", alone, beside, beside / alone])
    lines.append(["x real time", audio_s / alone, audio_s / beside, ""])
    return lines


def clients(options):
    """Sixteen recordings at once."""
    audio = (CLIPS / "jfk.wav").read_bytes()
    times = []
    with Server(options.binary, options.speech_folder, "--threads", str(options.threads)) as server:
        alone = server.transcribe(audio)[1] and server.transcribe(audio)[0]
        texts = []

        def one():
            took, text = server.transcribe(audio)
            times.append(took)
            texts.append(text)

        begun = time.monotonic()
        threads = [threading.Thread(target=one) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        whole = time.monotonic() - begun
        if len(set(texts)) != 1:
            sys.exit(f"speech: sixteen clients heard {len(set(texts))} different texts")
    return [["", "seconds"], ["one alone", alone], ["sixteen, the last", max(times)], ["a recording, of sixteen", whole / 16]]


SCENARIOS = {"speed": speed, "dictation": dictation, "memory": memory, "chat": chat, "clients": clients}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="these scenarios")
    parser.add_argument("--binary", default=str(ROOT / "target/release/greenroom"))
    parser.add_argument("--speech-folder", default="whisper-tiny.en", help="a model's folder; a path for the peer")
    parser.add_argument("--peer-python", help="an interpreter with faster-whisper")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=int, default=10, help="length of the long recording")
    parser.add_argument("--seconds", type=float, default=40, help="of chats alone")
    options = parser.parse_args()
    for name in options.only or SCENARIOS:
        print(f"\n{name}: {SCENARIOS[name].__doc__}\n")
        print("\n".join(rows(SCENARIOS[name](options))), flush=True)


if __name__ == "__main__":
    main()
