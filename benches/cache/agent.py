#!/usr/bin/env python3
"""How long a coding agent waits for the first token: cold, warm, about something else, and after a restart; beside llama.cpp, in turns.

    python3 benches/cache/agent.py                             the demo model, 3 rounds of each server
    python3 benches/cache/agent.py --turns 8 --rounds 1        shorter
    python3 benches/cache/agent.py --peer none                 this project's server alone
    python3 benches/cache/agent.py --llama-server PATH         a llama-server of your own instead of the wheel's

A round begins with an empty folder: the session's first request, the same again, its others, another question behind the same system prompt, a restart, and
the first request once more. Only the server that is measured is up. llama.cpp's slot is saved at the end of the session and restored
after the restart, which is what it has for that; files are read from the disk, not from the system's memory. Run nothing else meanwhile.
"""

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "versus"), str(HERE.parent / "load")]

import session
from figures import ratio, rows, said
from kept_servers import KeptGreenroom, KeptLlama, KeptNativeLlama, KeptServer, folder_bytes, forget_pages
from peers import HOME, ROOT
from versus import demo_model, load_average

# What is waited for: key and title, in the table's order.
WAITS = [
    ("cold", "cold"),
    ("same", "the same again"),
    ("ram", "following turns"),
    ("other", "other question"),
    ("again", "after restart"),
    ("restored", "  with restoring"),
]
HELLO = {"messages": [{"role": "user", "content": "Hello there, how are you?"}], "max_tokens": 8, "temperature": 0}
SETTLE = 1.0  # seconds between being well and the first request


def main():
    args = arguments()
    # Ended from outside, the servers end as well.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    model = Path(args.model).resolve() if args.model else demo_model()
    if not model.is_file():
        sys.exit(f"agent: {model} is no file")
    HOME.mkdir(parents=True, exist_ok=True)
    parent = Path(args.folder or HOME).resolve()
    folder = Path(tempfile.mkdtemp(prefix="agent-", dir=parent))
    try:
        sides = [Side(peer, model, args) for peer in peers(args, folder)]
        report = {"model": model.name, "threads": args.threads, "turns": args.turns, "rounds": args.rounds, "load_before": load_average()}
        for turn in range(args.rounds):
            # Nobody is always the second.
            for side in sides if turn % 2 == 0 else sides[::-1]:
                print(f"agent: round {turn + 1} of {args.rounds}, {side.peer.name}", file=sys.stderr)
                side.round()
        report["load_after"] = load_average()
        report["servers"] = {side.peer.name: side.report() for side in sides}
    except (RuntimeError, OSError) as error:
        sys.exit(f"agent: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=2) if args.json else table(report))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a .gguf file; without it the demo model")
    parser.add_argument("--rounds", type=int, default=3, help="of each server (default: 3)")
    parser.add_argument("--turns", type=int, default=session.TURNS, help=f"requests of the session (default: {session.TURNS})")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of both (default: 2)")
    parser.add_argument("--ctx", type=int, default=8192, help="context in tokens (default: 8192)")
    parser.add_argument("--calls", choices=["text", "openai"], default="text", help="openai: for a model whose template prints calls")
    parser.add_argument("--peer", choices=["llama.cpp", "llama.cpp-native", "none"], default="llama.cpp", help="the other server (default: llama.cpp)")
    parser.add_argument("--llama-server", type=Path, help="a llama-server to take for the peer")
    parser.add_argument("--greenroom", type=Path, default=ROOT / "target" / "release" / "greenroom", help="another binary than target/release's")
    parser.add_argument("--cache-ssd-gb", type=float, default=4.0, help="what our folder may hold (default: 4)")
    parser.add_argument("--folder", help="where the servers' folders are made; its disk is measured (default: below target)")
    parser.add_argument("--json", action="store_true", help="one JSON document with each round's figures")
    args = parser.parse_args()
    if min(args.rounds, args.threads, args.ctx) < 1 or args.turns < 2:
        parser.error("--rounds, --threads and --ctx are at least 1, --turns 2")
    return args


def peers(args, folder):
    ours = KeptGreenroom(args.greenroom.resolve(), folder / "ours", args.cache_ssd_gb)
    if args.llama_server:
        return ours, KeptNativeLlama(folder / "theirs", args.llama_server.resolve())
    if args.peer == "none":
        return (ours,)
    return ours, (KeptLlama if args.peer == "llama.cpp" else KeptNativeLlama)(folder / "theirs")


class Side:
    """A server and its figures, one value of each a round."""

    def __init__(self, peer, model, args):
        self.peer, self.model, self.args = peer, model, args
        self.values, self.differ = {}, 0
        self.bodies = session.requests(args.turns, args.calls)
        self.other = session.other_question(args.calls)
        peer.prepare(model)

    @property
    def is_ours(self):
        return isinstance(self.peer, KeptGreenroom)

    def round(self):
        shutil.rmtree(self.peer.folder, ignore_errors=True)
        self.peer.folder.mkdir(mode=0o700)
        with self.server() as server:
            cold = self.asked(server, "cold", self.bodies[0])
            self.asked(server, "same", self.bodies[0])
            warm = [server.ask(body) for body in self.bodies[1:]]
            self.note("ram", statistics.median(reply.first for reply in warm), statistics.median(reply.share for reply in warm))
            self.keep("ram_max", 1e3 * max(reply.first for reply in warm))
            self.keep("prompt_tokens", warm[-1].prompt_tokens)
            saved = None if self.is_ours else server.slot("save")[0]
            self.asked(server, "other", self.other)
            self.written(server, saved, warm[-1])
            server.stop_in_order()
        forget_pages(self.peer.folder)
        with self.server() as server:
            took = 0.0 if self.is_ours else server.slot("restore")[1]
            again = self.asked(server, "again", self.bodies[0])
            self.note("restored", again.first + took, again.share)
            self.differ += again.text != cold.text
            if self.is_ours:
                self.keep("from_disk", again.disk_tokens)

    def server(self):
        """A server that has answered once: the first request of all finds memory untouched."""
        server = KeptServer(self.peer, self.model, self.args.threads, self.args.ctx)
        try:
            server.wait()
            time.sleep(SETTLE)
            server.ask(HELLO)
        except BaseException:
            server.end()
            raise
        return server

    def asked(self, server, key, body):
        reply = server.ask(body)
        self.note(key, reply.first, reply.share)
        return reply

    def written(self, server, saved, last):
        """Bytes that the folder got, those in it, and those of the state of the longest conversation."""
        if self.is_ours:
            self.keep("written", server.all_written())
            state = self.peer.state_bytes(self.model) * last.prompt_tokens
        else:
            self.keep("written", saved["n_written"])
            state = saved["n_written"] / saved["n_saved"] * last.prompt_tokens
        self.keep("in_folder", folder_bytes(self.peer.folder))
        self.keep("state", state)

    def note(self, key, seconds, share):
        self.keep(key, 1e3 * seconds)
        self.keep(f"{key}_share", share)

    def keep(self, key, value):
        self.values.setdefault(key, []).append(value)

    def report(self):
        medians = {key: statistics.median(found) for key, found in self.values.items()}
        return {"medians": medians, "rounds": self.values, "answers_that_differ": self.differ}


def table(report):
    servers = report["servers"]
    names, found = list(servers), [server["medians"] for server in servers.values()]
    lines = [["first token after ms", *(cell for name in names for cell in (name, "of cold", "cached")), *(["better by"] if len(names) > 1 else [])]]
    for key, title in WAITS:
        cells = [cell for side in found for cell in (side[key], f"{ratio(side[key], side['cold']):.3f}", f"{side[f'{key}_share']:.1%}")]
        lines.append([title, *cells, *([ratio(found[1][key], found[0][key])] if len(found) > 1 else [])])
    text = [f"{report['model']}, {report['threads']} threads, {report['turns']} turns, medians of {report['rounds']} rounds in turns"]
    text += [f"load average {report['load_before']} before, {report['load_after']} after", "", *rows(lines), ""]
    for name, side in zip(names, found):
        text.append(
            f"{name}: longest prompt {side['prompt_tokens']:.0f} tokens, its state {side['state'] / 2**20:.1f} MiB; "
            f"{side['written'] / 2**20:.1f} MiB written ({ratio(side['written'], side['state']):.2f} times the state), {side['in_folder'] / 2**20:.1f} MiB in the folder; "
            f"slowest following turn {said(side['ram_max'])} ms" + (f"; {side['from_disk']:.0f} tokens from disk" if "from_disk" in side else "")
        )
        if differ := servers[name]["answers_that_differ"]:
            text.append(f"{name}: {differ} answers after a restart were not the cold ones")
    return "\n".join(text)


if __name__ == "__main__":
    main()
