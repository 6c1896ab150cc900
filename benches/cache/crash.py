#!/usr/bin/env python3
"""Whether the cache folder survives being killed: SIGKILL at random moments under load, and every answer compared after each restart.

    python3 benches/cache/crash.py target/release/greenroom               10 kills
    python3 benches/cache/crash.py target/release/greenroom --kills 100 --seed 7
    python3 benches/cache/crash.py target/release/greenroom --no-verify   a binary without `cache verify`

What is right is said by a server without any cache, once at the start. Ends with 1 where an answer was wrong, a folder did not pass
`greenroom cache verify`, or a request failed while its server lived. The seed gives the same prompts and moments, not the same course.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "versus"), str(HERE.parent / "load")]

from kept_servers import KeptGreenroom, KeptServer
from peers import HOME
from prompts import Words
from versus import demo_model, load_average

SHARED = (80, 200, 320)  # tokens that prompts begin with together
OWN = (10, 160)  # tokens of a prompt's own: at least, at most
ANSWER = 8
MOMENT = (0.05, 3.0)  # seconds from being ready to being killed: at least, at most
EARLY_SHARE = 0.25  # of the restarts, those that are killed before they are ready
EARLY = (0.01, 0.5)  # seconds from being started, for these

TITLES = {
    "kills": "kills",
    "early": "  of which before the server was ready",
    "restarts": "restarts that were looked at",
    "removed": "damaged files removed at a start",
    "unfinished": "unfinished files removed at a start",
    "verified": "folders that passed `cache verify`",
    "not_verified": "folders that did not",
    "whole": "answers under load before a kill",
    "broken": "answers that a kill broke off",
    "compared": "answers compared after a restart",
    "cached": "  of which with tokens from the cache",
    "from_disk": "  of which with tokens from disk",
    "failed": "requests that failed while the server lived",
    "wrong": "wrong answers",
}
FAULTS = ("wrong", "failed", "not_verified")


def main():
    args = arguments()
    # Ended from outside, the servers end as well.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    model = Path(args.model).resolve() if args.model else demo_model()
    if not model.is_file():
        sys.exit(f"crash: {model} is no file")
    HOME.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=Path(args.folder or HOME).resolve()))
    crash = Crash(args, model, folder / "cache")
    try:
        crash.run()
    except (RuntimeError, OSError) as error:
        sys.exit(f"crash: {error}\ncrash: the folder is left in {folder}")
    counts = {key: crash.counts[key] for key in TITLES}
    bad = any(counts[key] for key in FAULTS)
    if not bad:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(json.dumps({"seed": args.seed, "load": load_average(), **counts, "said": crash.said}, indent=2))
    else:
        print(*(f"{title:<46}{counts[key]:>7}" for key, title in TITLES.items()), *crash.said, sep="\n")
    if bad:
        sys.exit(f"crash: see above; the folder is left in {folder}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("greenroom", type=Path, help="the binary")
    parser.add_argument("--model", help="a .gguf file; without it the demo model")
    parser.add_argument("--kills", type=int, default=10, help="how often (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and moments (default: 1)")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time under load (default: 4)")
    parser.add_argument("--prompts", type=int, default=16, help="different ones (default: 16)")
    parser.add_argument("--check", type=int, default=4, help="answers compared after each restart (default: 4)")
    parser.add_argument("--cache-ssd-gb", type=float, default=0.05, help="what the folder may hold; small, so that files go as well (default: 0.05)")
    parser.add_argument("--write-mib-s", type=int, default=20, help="most that is written a second; slow, so that kills meet a write (default: 20)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (default: 2)")
    parser.add_argument("--ctx", type=int, default=2048, help="context in tokens (default: 2048)")
    parser.add_argument("--folder", help="where the cache folder is made (default: below target)")
    parser.add_argument("--no-verify", action="store_true", help="do not run `cache verify`")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    args.greenroom = args.greenroom.resolve()
    if not args.greenroom.is_file():
        parser.error(f"{args.greenroom} is no file")
    if min(args.kills, args.clients, args.check, args.threads, args.write_mib_s) < 1 or args.prompts < args.check:
        parser.error("numbers are at least 1, --prompts at least --check")
    return args


class Crash:
    """The course of kills. Client threads add to the counts and keep the lock for it."""

    def __init__(self, args, model, folder):
        self.args, self.model, self.folder = args, model, folder
        self.random = random.Random(args.seed)
        self.bodies = bodies(args.seed, args.prompts)
        self.counts, self.said, self.lock = Counter(), [], threading.Lock()

    def run(self):
        args = self.args
        self.expected = self.without_cache()
        # Room for the clients' requests: none of them is refused.
        settings = {"cache.ssd_write_mib_s": args.write_mib_s}
        self.peer = KeptGreenroom(args.greenroom, self.folder, args.cache_ssd_gb, settings)
        server = self.ready()
        while True:
            try:
                if self.counts["kills"]:
                    self.look_at(server)
                if self.counts["kills"] >= args.kills:
                    server.stop_in_order()
                    return
                self.killed_under_load(server)
            finally:
                server.end()
            self.progress()
            if self.random.random() < EARLY_SHARE and self.counts["kills"] < args.kills:
                self.killed_early()
            server = self.ready()

    def progress(self):
        counts = self.counts
        print(f"crash: {counts['kills']} of {self.args.kills} kills, {counts['compared']} compared, {counts['wrong']} wrong", file=sys.stderr)

    def without_cache(self):
        with KeptServer(KeptGreenroom(self.args.greenroom, None), self.model, self.args.threads, self.args.ctx) as server:
            answers = [server.ask(body) for body in self.bodies]
        if any(answer.cached_tokens for answer in answers):
            raise RuntimeError("the server without a cache took tokens from one")
        return [answer.text for answer in answers]

    def start(self):
        return KeptServer(self.peer, self.model, self.args.threads, self.args.ctx)

    def ready(self):
        server = self.start()
        try:
            server.wait()
        except BaseException:
            server.end()
            raise
        return server

    def look_at(self, server):
        """After a restart: what was removed, whether the folder is whole, and whether answers are right."""
        self.counts["restarts"] += 1
        found = server.opened()
        if found is None:
            raise RuntimeError(f"the server did not open its folder:\n{server.said()}")
        self.counts["removed"] += found[0]
        self.counts["unfinished"] += found[1]
        if not self.args.no_verify:
            self.verify()
        for number in self.random.sample(range(len(self.bodies)), self.args.check):
            try:
                answer = server.ask(self.bodies[number])
            except (RuntimeError, OSError) as error:
                self.fault("failed", f"prompt {number} after a restart: {error}")
                continue
            self.counts["compared"] += 1
            self.counts["cached"] += answer.cached_tokens > 0
            self.counts["from_disk"] += answer.disk_tokens > 0
            self.compare(number, answer, f"after kill {self.counts['kills']}")

    def verify(self):
        command = [str(self.args.greenroom), "cache", "verify", str(self.folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode == 0:
            self.counts["verified"] += 1
        else:
            self.fault("not_verified", f"cache verify ended with {done.returncode} after kill {self.counts['kills']}: {done.stdout.strip()[-400:]}")

    def killed_under_load(self, server):
        gone = threading.Event()
        seeds = [self.random.random() for _ in range(self.args.clients)]
        clients = [threading.Thread(target=self.client, args=(server, seed, gone), daemon=True) for seed in seeds]
        for client in clients:
            client.start()
        try:
            time.sleep(self.random.uniform(*MOMENT))
            if server.process.poll() is not None:
                raise RuntimeError(f"the server ended by itself with {server.process.returncode}:\n{server.said()}")
        finally:
            gone.set()
            server.kill()
        for client in clients:
            client.join()
        self.counts["kills"] += 1

    def killed_early(self):
        server = self.start()
        try:
            time.sleep(self.random.uniform(*EARLY))
            server.kill()
        finally:
            server.end()
        self.counts["kills"] += 1
        self.counts["early"] += 1
        self.progress()

    def client(self, server, seed, gone):
        """One request after another, until the server is gone."""
        chance = random.Random(seed)
        while not gone.is_set():
            number = chance.randrange(len(self.bodies))
            try:
                answer = server.ask(self.bodies[number])
            except (RuntimeError, OSError) as error:
                if gone.is_set():
                    with self.lock:
                        self.counts["broken"] += 1
                else:
                    self.fault("failed", f"prompt {number} under load: {error}")
                    time.sleep(0.1)
                continue
            with self.lock:
                self.counts["whole"] += 1
            self.compare(number, answer, "under load")

    def compare(self, number, answer, when):
        if answer.text != self.expected[number]:
            what = f"prompt {number} {when}, {answer.cached_tokens} tokens cached, {answer.disk_tokens} of them from disk"
            self.fault("wrong", f"{what}: {answer.text!r} instead of {self.expected[number]!r}")

    def fault(self, key, what):
        with self.lock:
            self.counts[key] += 1
            self.said.append(f"{key}: {what}")
        print(f"crash: {key}: {what}", file=sys.stderr)


def bodies(seed, count):
    """Prompts of many lengths, some of which begin alike."""
    words, chance = Words(seed), random.Random(seed)
    beginnings = [words.about(tokens) for tokens in SHARED]
    found = []
    for number in range(count):
        said = f"{beginnings[number % len(beginnings)]} {words.about(chance.randint(*OWN))}"
        messages = [{"role": "system", "content": "Go on with these words."}, {"role": "user", "content": said}]
        found.append({"messages": messages, "max_tokens": ANSWER, "temperature": 0, "session_id": f"crash-{number}"})
    return found


if __name__ == "__main__":
    main()
