"""Many clients of several kinds for some minutes: chats, medium and long prompts, agents, people who go away, slow readers."""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

from client import BROKEN, CANCELLED, DONE, FAILED, UNFINISHED, Ask, Call, gauges
from figures import fairness, rows, said, waits
from server_pair import Shape

ROWS = 16  # computed together, by both servers
GRACE = 120.0  # seconds that answers under way get at the end
EMPTY_LIMIT = 10.0  # seconds until gauges must be at zero after the last answer
# Gauges of ours that count live things.
WRONG = "NOT ALL ZERO"
LIVE = ("tickets_live", "rows_running", "rows_waiting", "rows_parked")


@dataclass(frozen=True)
class Kind:
    """Clients of one kind: each asks, reads, thinks, and asks again."""

    name: str
    share: int  # of 64 clients
    prompt: int  # tokens of its own
    answer: int  # tokens
    think: float  # seconds between two requests, on average
    shared: int = 0  # tokens before, the same for all of this kind
    cancel_after: int | None = None
    pause: float = 0.0
    priority: str = "normal"


KINDS = [
    Kind("chat", 28, 40, 64, think=2.0, priority="interactive"),
    Kind("medium", 12, 400, 96, think=4.0),
    Kind("agent", 10, 60, 48, think=0.2, shared=1200, priority="background"),
    Kind("long", 4, 3000, 32, think=20.0),
    Kind("cancels", 6, 200, 256, think=2.0, cancel_after=24),
    Kind("slow", 4, 60, 96, think=2.0, pause=0.05),
]


class Mix:
    """See the module."""

    name = "mix"
    title = "a mix of clients"

    def __init__(self, args, words):
        self.args, self.words = args, words
        # With --long everything becomes shorter, thinking as well.
        self.scale = min(1.0, args.long / 4000)
        prompt = max(self.tokens(kind.prompt) + self.tokens(kind.shared) + kind.answer for kind in KINDS)
        # Rows and places in the queue for all clients, the same number of rows as the peer has slots.
        settings = {"scheduler.max_rows": ROWS, "scheduler.max_queue": max(64, args.clients)}
        self.shape = Shape(ROWS, prompt * 5 // 4 + 64, settings)

    def tokens(self, count):
        return max(1, round(count * self.scale)) if count else 0

    def run(self, server):
        begun, until = time.monotonic(), time.monotonic() + self.args.seconds
        shared = {kind: self.words.about(self.tokens(kind.shared)) if kind.shared else "" for kind in KINDS}
        clients = [Client(kind, number, self, shared[kind]) for kind in KINDS for number in range(self.share(kind))]
        for client in clients:
            client.start(server.url, until)
        cut_off = until + GRACE
        for client in clients:
            client.join(cut_off)
        ended = time.monotonic()
        answers = {kind: [answer for client in clients if client.kind is kind for answer in client.answers] for kind in KINDS}
        figures = self.totals([answer for found in answers.values() for answer in found], begun, until)
        figures["ran_s"] = ended - begun
        figures["left_over"] = live_at_the_end(server.url)
        for kind in KINDS:
            figures[kind.name] = self.of_kind(kind, answers[kind], [client for client in clients if client.kind is kind])
        return figures

    def share(self, kind):
        return max(1, round(kind.share * self.args.clients / 64))

    def totals(self, answers, begun, until):
        outcomes = Counter(answer.outcome for answer in answers)
        pieces = sum(begun < at <= until for answer in answers for at in answer.times)
        broken = [answer for answer in answers if answer.outcome == BROKEN or (answer.outcome == FAILED and not answer.error)]
        return {
            "completed": outcomes[DONE],
            "cancelled": outcomes[CANCELLED],
            "failed": outcomes[FAILED] + outcomes[BROKEN],
            "without_clear_error": len(broken),
            "unfinished": outcomes[UNFINISHED],
            "errors": Counter(f"{answer.outcome}: {answer.error}" for answer in answers if answer.outcome in (FAILED, BROKEN)),
            "refusals": sum(answer.refusals for answer in answers),
            "rate": pieces / (until - begun),
            "cached": sum(answer.cached_tokens for answer in answers),
        }

    def of_kind(self, kind, answers, clients):
        first = waits(answer.first for answer in answers)
        gaps = waits(gap for answer in answers for gap in answer.gaps)
        got = [sum(len(answer.times) for answer in client.answers) for client in clients]
        return {
            "clients": len(clients),
            "answers": len(answers),
            "first": first,
            "gaps": gaps,
            "fairness": fairness(got),
        }

    def faults(self, sides):
        """What must not be, of our server: an end without a reason, a gauge that does not return to zero."""
        ours = sides.values[0]
        if ours["without_clear_error"][0]:
            yield f"{ours['without_clear_error'][0]} requests ended without a clear error"
        if WRONG in (ours["left_over"][0] or ""):
            yield f"gauges at the end: {ours['left_over'][0]}"

    def lines(self, sides):
        sums = {
            "completed": "completed",
            "cancelled": "cancelled",
            "failed": "failed",
            "without_clear_error": "  without a clear error",
            "unfinished": f"not whole {GRACE:.0f} s after the end",
            "refusals": "refusals that were retried",
            "rate": "tokens/s in all",
        }
        yield from rows([["", *sides.names], *([title, *[values[key][0] for values in sides.values]] for key, title in sums.items())])
        head = ["", "clients", "answers", "first p50 ms", "p99", "gap p50 ms", "p99", "longest", "fairness"]
        for name, values in zip(sides.names, sides.values):
            yield f"\n{name}"
            table = [head]
            for kind in KINDS:
                found = values[kind.name][0]
                first, gaps = found["first"], found["gaps"]
                cells = [first["p50"], first["p99"], gaps["p50"], gaps["p99"], gaps["max"]]
                table.append([kind.name, str(found["clients"]), str(found["answers"]), *map(said, cells), f"{found['fairness']:.3f}"])
            yield from rows(table)
            for error, count in values["errors"][0].most_common(8):
                yield f"{count} × {error}"
            if values["left_over"][0] is not None:
                yield f"gauges at the end: {values['left_over'][0]}"
        asked = ", ".join(f"{kind.name} {self.tokens(kind.shared) + self.tokens(kind.prompt)} + {kind.answer}" for kind in KINDS)
        yield f"\n{self.args.seconds:.0f} s, {sum(map(self.share, KINDS))} clients, {ROWS} rows; tokens of prompts and answers: {asked}"


class Client:
    """One client: a thread that asks until the time is over."""

    def __init__(self, kind, number, mix, shared):
        self.kind, self.mix, self.shared = kind, mix, shared
        self.name = f"{kind.name}-{number}"
        # Each has its own: threads take turns in another order each time, the prompts are the same.
        self.random = random.Random(f"{mix.args.seed} {self.name}")
        self.words = type(mix.words)(self.random.random())
        self.answers, self.call = [], None

    def start(self, url, until):
        self.thread = threading.Thread(target=self.live, args=(url, until), daemon=True)
        self.thread.start()

    def live(self, url, until):
        kind = self.kind
        # Nobody comes at the same moment.
        think = kind.think * self.mix.scale
        time.sleep(min(self.random.uniform(0, think), max(0.0, until - time.monotonic())))
        while time.monotonic() < until:
            own = self.words.about(self.mix.tokens(kind.prompt))
            priority = kind.priority if self.mix.args.priorities else None
            ask = Ask(f"{self.shared} {own}".strip(), kind.answer, self.name, priority, kind.cancel_after, kind.pause)
            self.call = Call(url, ask)
            answer = self.call.run()
            self.answers.append(answer)
            time.sleep(min(self.random.expovariate(1 / think), max(0.0, until - time.monotonic())))

    def join(self, cut_off):
        """Waits; what is not whole by then is cut off: the server was too slow for it."""
        self.thread.join(max(0.0, cut_off - time.monotonic()))
        if self.thread.is_alive() and self.call:
            self.call.close()
            self.thread.join()
            last = self.answers[-1]
            if last.outcome == CANCELLED:
                last.outcome = UNFINISHED


def live_at_the_end(url):
    """Our gauges once all clients are gone, in words; None for a server that has none of ours."""
    deadline = time.monotonic() + EMPTY_LIMIT
    while True:
        found = gauges(url)
        if found is None:
            return None
        live = {name: int(found[f"greenroom_{name}"]) for name in LIVE if f"greenroom_{name}" in found}
        if not any(live.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    text = ", ".join(f"{name} {value}" for name, value in live.items())
    kept = int(found.get("greenroom_kv_used_bytes", 0)), int(found.get("greenroom_cache_entries", 0))
    wrong = any(live.values()) or (kept[0] and not kept[1])
    return f"{text}; {WRONG if wrong else 'all zero'}; {kept[0]:,} bytes are kept by {kept[1]} finished rows for reuse"
