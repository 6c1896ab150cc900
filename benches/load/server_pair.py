"""Servers in turns, and tables of their figures side by side."""

import sys
import time
from dataclasses import dataclass, field

from client import DONE, Ask, Call
from figures import quantile, ratio, rows
from servers import Server, free_port


# Seconds from SIGCONT to the first request: servers look at the clock now and then only, and one that still has the time of its
# stop takes a new connection for one that has said nothing for minutes.
AWAKE = 1.5


def check(server, answer):
    """Refuses an answer that is not whole."""
    if answer.outcome != DONE:
        raise RuntimeError(f"{server.name}: a request ended as {answer.outcome}: {answer.error}")


@dataclass(frozen=True)
class Shape:
    """What a scenario needs of a server."""

    slots: int  # requests computed together
    context: int  # tokens of each
    settings: dict = field(default_factory=dict)  # of ours, where its defaults do not do


class Sides:
    """The servers that are measured: ours alone, or ours and a peer."""

    def __init__(self, peers):
        self.peers = peers
        self.names = [peer.name for peer in peers]
        # Of each side, of each figure, the rounds' values.
        self.values = [{} for _ in peers]

    def measure(self, scenario, model, threads, rounds):
        """Brings each server up, and measures them in turns; whoever is not measured is stopped."""
        shape, up = scenario.shape, []
        try:
            for peer in self.peers:
                port = free_port()
                launch = peer.launch(model, port, threads, shape.slots, shape.slots * shape.context)
                server = Server(peer.name, launch, port)
                up.append(server)
                server.wait()
                # The first request of all finds memory untouched.
                self.asked(server, lambda: check(server, Call(server.url, Ask("Hello there, how are you?", 8)).run()))
                server.stop()
            for turn in range(rounds):
                for server, values in zip(up, self.values):
                    print(f"load: {scenario.name}, round {turn + 1} of {rounds}, {server.name}", file=sys.stderr)
                    server.go()
                    time.sleep(AWAKE)
                    for key, value in self.asked(server, lambda: scenario.run(server)).items():
                        values.setdefault(key, []).append(value)
                    server.stop()
        finally:
            for server in up:
                server.end()
        return self

    @staticmethod
    def asked(server, run):
        try:
            return run()
        except RuntimeError as error:
            sys.exit(f"load: {error}\n{server.said()}")

    def median(self, side, key):
        return quantile(self.values[side].get(key, []), 0.5)

    def table(self, wanted):
        """Rows of (figure, title, whether more is better); a ratio says how many times better ours is."""
        lines = [["", *self.names, *(["better by"] if len(self.peers) > 1 else [])]]
        for key, title, more_is_better in wanted:
            found = [self.median(side, key) for side in range(len(self.peers))]
            if len(found) > 1:
                found.append(ratio(found[0], found[1]) if more_is_better else ratio(found[1], found[0]))
            lines.append([title, *found])
        return rows(lines)

    def report(self):
        return {name: values for name, values in zip(self.names, self.values)}
