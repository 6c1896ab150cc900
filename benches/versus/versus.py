#!/usr/bin/env python3
"""How fast Greenroom serves a model, beside other servers: the same file, threads, lengths of prompts and client, in turns (A B A B) in one run.

    make versus                                    the demo model against llama.cpp's wheel
    make versus ARGS="--peers llama.cpp,mlx-lm"    other peers: see --help
    make versus ARGS="model.gguf --json"           another model, figures for scripts

The client is `greenroom bench --url`: its prompts are new words in every round, so nobody's cache helps. Two servers are up at a time, the
one that is not measured is stopped (SIGSTOP), so that a spinning thread costs the other nothing. Run nothing else meanwhile.

Figures are medians over the rounds. The long context is measured on a server of its own, with one slot: llama.cpp shares its context among
the slots, and memory for eight long ones would be counted against it.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from peers import PEERS, ROOT, Greenroom
from servers import Server, free_port, physical_cores

# What is printed of a pair, in this order: key, title, unit, decimals; a ratio is ours by theirs.
FIGURES = [
    ("prefill", "prefill", "tokens/s", 1),
    ("decode", "decode, 1 client", "tokens/s", 1),
    ("together", "decode, all clients", "tokens/s", 1),
    ("decode_long", "decode after a long context", "tokens/s", 1),
    ("long_share", "long context by short one", "", 2),
    ("memory", "memory, idle after load", "MiB", 1),
    ("memory_by_file", "memory by file size", "", 2),
    ("idle", "processor while idle", "cores", 3),
]


def main():
    args = arguments()
    # Ended from outside, the servers end as well.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    model = Path(args.model).resolve() if args.model else demo_model()
    if not model.is_file():
        sys.exit(f"versus: {model} is no file")
    threads = args.threads or physical_cores()
    ours = Greenroom(Path(args.greenroom).resolve())
    ours.prepare(model)
    peers = [PEERS[name]() for name in args.peers]
    for peer in peers:
        peer.prepare(model)
    report = {"model": model.name, "file_bytes": model.stat().st_size, "threads": threads}
    report["load_before"] = load_average()
    report["pairs"] = [Pair(ours, peer, model, threads, args).measure() for peer in peers]
    report["load_after"] = load_average()
    print(json.dumps(report, indent=2) if args.json else table(report))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a .gguf file; without it the demo model")
    parser.add_argument("--peers", default="llama.cpp", type=names, help=f"some of {','.join(PEERS)} (default: llama.cpp)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server (default: 5)")
    parser.add_argument("--threads", type=int, help="compute threads of both (default: physical cores)")
    parser.add_argument("--no-long", action="store_true", help="leave the long context out")
    parser.add_argument("--greenroom", default=ROOT / "target" / "release" / "greenroom", help="another binary than target/release's")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    if args.rounds < 1 or (args.threads or 1) < 1:
        parser.error("--rounds and --threads are at least 1")
    return args


def names(text):
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(PEERS)}")
    return wanted


def demo_model():
    said = subprocess.run([ROOT / "native" / "model.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return Path(said.splitlines()[-1])


def load_average():
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


class Pair:
    """Greenroom and one peer."""

    def __init__(self, ours, peer, model, threads, args):
        self.sides = (ours, peer)
        self.shape = peer.shape
        self.model, self.threads = model, threads
        self.rounds = min(args.rounds, getattr(peer, "most_rounds", args.rounds))
        self.long = self.shape.long if not args.no_long else 0
        self.client = ours.binary
        self.notes = []
        # Of each side, of each figure, the rounds' values.
        self.values = ({}, {})

    def measure(self):
        shape = self.shape
        # Room for prompt and answer of every client, and of the prompt that is measured alone, with some to spare.
        room = 256 + max(shape.prompt, shape.context + shape.generate)
        self.turns(shape.clients, shape.clients * room, self.short)
        if self.long:
            self.turns(1, self.long + self.long // 4 + shape.long_generate, self.after_long)
        report = {"peer": self.sides[1].name, "rounds": self.rounds, "shape": vars(shape) | {"long": self.long}, "notes": sorted(set(self.notes))}
        for side, values in zip(("ours", "theirs"), self.values):
            report[side] = {key: statistics.median(found) for key, found in values.items()}
            report[f"{side}_rounds"] = values
        report["ratios"] = {
            key: report["ours"][key] / report["theirs"][key]
            for key, *_ in FIGURES
            if report["ours"].get(key) and report["theirs"].get(key)
        }
        return report

    def turns(self, slots, context, measured):
        """Brings both up and measures them in turns."""
        with self.server(0, slots, context) as first:
            memory = [first.idle()]
            first.stop()
            with self.server(1, slots, context) as second:
                memory.append(second.idle())
                second.stop()
                if measured == self.short:
                    self.note_idle(memory)
                for turn in range(self.rounds):
                    for side, server in enumerate((first, second)):
                        print(f"versus: round {turn + 1} of {self.rounds}, {server.name}", file=sys.stderr)
                        server.go()
                        for key, value in measured(server).items():
                            self.values[side].setdefault(key, []).append(value)
                        server.stop()

    def server(self, side, slots, context):
        peer, port = self.sides[side], free_port()
        return Server(peer.name, peer.launch(self.model, port, self.threads, slots, context), port)

    def note_idle(self, memory):
        for values, (resident, share) in zip(self.values, memory):
            values["memory"] = [resident / 2**20]
            values["memory_by_file"] = [resident / self.model.stat().st_size]
            values["idle"] = [share]

    def short(self, server):
        shape = self.shape
        clients = sorted({1, shape.clients})
        report = self.bench(server, shape.prompt, shape.context, shape.generate, clients)
        if report["prefill"]["cached_tokens"]:
            self.notes.append(f"{server.name} took tokens of the measured prompt from a cache; they are not counted")
        decode = {burst["clients"]: burst for burst in report["decode"]}
        figures = {"prefill": report["prefill"]["tokens_per_second"], "decode": decode[1]["client_tokens_per_second"]}
        if shape.clients > 1:
            figures["together"] = decode[shape.clients]["total_tokens_per_second"]
        return figures

    def after_long(self, server):
        shape, figures = self.shape, {}
        for key, context in (("near", shape.context), ("decode_long", self.long)):
            report = self.bench(server, 16, context, shape.long_generate, [1])
            figures[key] = report["decode"][0]["client_tokens_per_second"]
        return {"decode_long": figures["decode_long"], "long_share": figures["decode_long"] / figures["near"]}

    def bench(self, server, prompt, context, generate, clients):
        command = [self.client, "bench", "--url", server.url, "--json", "--rounds", 1, "--prompt", prompt]
        command += ["--context", context, "--gen", generate, "--concurrency", ",".join(map(str, clients))]
        done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"versus: measuring {server.name} failed: {done.stderr.strip()}\n{server.said()}")
        report = json.loads(done.stdout)
        for burst in report["decode"]:
            if burst["least_tokens"] < generate:
                self.notes.append(f"{server.name} ended an answer after {burst['least_tokens']} of {generate} tokens")
        return report


def table(report):
    size = report["file_bytes"] / 2**20
    lines = [
        f"{report['model']} ({size:.1f} MiB), {report['threads']} threads, medians of rounds in turns",
        f"load average {report['load_before']} before, {report['load_after']} after",
    ]
    for pair in report["pairs"]:
        shape = pair["shape"]
        lines += ["", f"{'':<30}{'greenroom':>12}{pair['peer']:>18}{'ratio':>9}"]
        for key, title, unit, digits in FIGURES:
            if key in pair["ours"] and key in pair["theirs"]:
                ratio = pair["ratios"].get(key)
                said = f"{ratio:9.2f}" if ratio and key != "idle" else ""
                lines.append(f"{title:<30}{pair['ours'][key]:>12.{digits}f}{pair['theirs'][key]:>18.{digits}f}{said:>9}  {unit}".rstrip())
        asked = f"{pair['rounds']} rounds; prompt of {shape['prompt']} tokens; {shape['generate']} new after {shape['context']}; {shape['clients']} clients"
        lines.append(asked + (f"; long context: {shape['long']}" if shape["long"] else ""))
        lines += pair["notes"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
