#!/usr/bin/env python3
"""How Greenroom behaves under load, beside llama.cpp's server: the same file, threads, prompts and clients, in turns in one run.

    make load                                  a long prompt arrives; one agent beside one person; a mix of 64 clients for 5 minutes
    make load ARGS="--only long,agent"         some of: long, agent, mix
    make load ARGS="--only mix --seconds 60"   a shorter mix
    make load ARGS="--smoke"                   seconds, this project's server alone: whether it works, no figures to quote

All servers are up at a time; those that are not measured are stopped (SIGSTOP). Run nothing else meanwhile. Servers are set up and
started by what `make versus` has for it.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "versus"))

from agent import Agent
from long_prompt import LongPrompt
from mix import Mix
from peers import PEERS, ROOT, Greenroom, Llama
from prompts import Words
from server_pair import Sides
from servers import physical_cores
from versus import demo_model, load_average, names

SCENARIOS = {scenario.name: scenario for scenario in (LongPrompt, Agent, Mix)}


def main():
    args = arguments()
    # Ended from outside, the servers end as well.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    model = Path(args.model).resolve() if args.model else demo_model()
    if not model.is_file():
        sys.exit(f"load: {model} is no file")
    threads = args.threads or physical_cores()
    report = {"model": model.name, "threads": threads, "seed": args.seed, "scenarios": {}}
    if not args.json:
        print(f"{model.name}, {threads} threads, seed {args.seed}; medians of rounds in turns")
    faults = []
    for name in args.only:
        scenario = SCENARIOS[name](args, Words(args.seed))
        servers = sides(args, model, scenario)
        before = load_average()
        servers.measure(scenario, model, threads, args.rounds if name != "mix" else 1)
        report["scenarios"][name] = {"load": [before, load_average()], "servers": servers.report()}
        if not args.json:
            print(f"\n{scenario.title}; load average {before} before, {load_average()} after\n", *scenario.lines(servers), sep="\n", flush=True)
        faults += getattr(scenario, "faults", lambda _: [])(servers)
    if args.json:
        print(json.dumps(report, indent=2))
    if faults:
        sys.exit("load: " + "; ".join(faults))


def sides(args, model, scenario):
    ours = Greenroom(Path(args.greenroom).resolve(), {**scenario.shape.settings, **dict(args.set)})
    # With its prompt cache, as ours has one: agents share what they begin with.
    peers = [PEERS[name](remembers=True) if PEERS[name] is Llama else PEERS[name]() for name in args.peers]
    for peer in (ours, *peers):
        peer.prepare(model)
    return Sides([ours, *peers])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a .gguf file; without it the demo model")
    parser.add_argument("--only", default=list(SCENARIOS), type=scenarios, help=f"some of {','.join(SCENARIOS)}")
    parser.add_argument("--peers", default=["llama.cpp"], type=lambda text: names(text) if text else [], help="the other server; '' for none")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server, but for the mix (default: 3)")
    parser.add_argument("--threads", type=int, help="compute threads of both (default: physical cores)")
    parser.add_argument("--greenroom", default=ROOT / "target" / "release" / "greenroom", help="another binary than target/release's")
    parser.add_argument("--set", action="append", default=[], type=setting, metavar="NAME=VALUE", help="a setting of our server, as scheduler.max_rows=32")
    parser.add_argument("--priorities", action="store_true", help="send X-Priority: interactive, normal or background")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: 1)")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long prompt (default: 4000)")
    parser.add_argument("--streams", type=int, default=4, help="streams beside it (default: 4)")
    parser.add_argument("--parallel", type=int, default=20, help="requests of the agent at once (default: 20)")
    parser.add_argument("--questions", type=int, default=8, help="of the person, alone and beside the agent (default: 8)")
    parser.add_argument("--clients", type=int, default=64, help="of the mix (default: 64)")
    parser.add_argument("--seconds", type=float, default=300, help="of the mix (default: 300)")
    parser.add_argument("--smoke", action="store_true", help="this project's server alone, everything small")
    parser.add_argument("--json", action="store_true", help="one JSON document with each round's figures")
    args = parser.parse_args()
    if args.smoke:
        args.peers, args.rounds, args.long, args.streams = [], 1, 400, 2
        args.parallel, args.questions, args.clients, args.seconds = 4, 2, 16, 4
    if min(args.rounds, args.threads or 1, args.streams, args.parallel, args.questions, args.clients) < 1 or args.long < 100:
        parser.error("numbers are at least 1, --long at least 100")
    return args


def scenarios(text):
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in SCENARIOS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(SCENARIOS)}")
    return wanted


def setting(text):
    name, equals, value = text.partition("=")
    if not (equals and "." in name):
        raise argparse.ArgumentTypeError(f"{text}: is not NAME=VALUE with a name as scheduler.max_rows")
    return name, value


if __name__ == "__main__":
    main()
