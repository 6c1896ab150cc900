"""One agent with many parallel requests beside one person, who is measured alone first and beside it then."""

import threading
import time

from client import CANCELLED, DONE, Ask, Call
from figures import quantile, waits
from server_pair import Shape, check

PERSON_PROMPT, PERSON_ANSWER = 60, 48
AGENT_PROMPT, AGENT_OWN, AGENT_ANSWER = 600, 40, 64  # what all its requests begin with, what each goes on with
WARM_UP = 5.0  # seconds of the agent before the person comes
THINKING = 0.3  # seconds between two questions of the person


class Agent:
    """Client identities differ; with priorities the person is `interactive` and the agent `background`."""

    name = "agent"
    title = "one agent with parallel requests beside one person"

    def __init__(self, args, words):
        self.words, self.parallel, self.questions = words, args.parallel, args.questions
        self.priorities = ("interactive", "background") if args.priorities else (None, None)
        longest = max(PERSON_PROMPT + PERSON_ANSWER, AGENT_PROMPT + AGENT_OWN + AGENT_ANSWER)
        self.shape = Shape(slots=min(16, args.parallel + 1), context=longest * 5 // 4 + 64)

    def run(self, server):
        alone = self.person(server)
        stop = threading.Event()
        done, failed = [], []
        shared = self.words.about(AGENT_PROMPT)
        asks = [iter(self.agent_asks(shared)) for _ in range(self.parallel)]
        threads = [threading.Thread(target=self.agent, args=(server, ask, stop, done, failed), daemon=True) for ask in asks]
        for thread in threads:
            thread.start()
        time.sleep(WARM_UP)
        began = time.monotonic()
        try:
            beside = self.person(server)
        finally:
            took = time.monotonic() - began
            stop.set()
            for thread in threads:
                thread.join()
        for answer in alone + beside + failed:
            check(server, answer)
        pieces = sum(began < at <= began + took for answer in done for at in answer.times)
        figures = {"agent_rate": pieces / took}
        for when, answers in (("alone", alone), ("beside", beside)):
            first = waits(answer.first for answer in answers)
            gaps = waits(gap for answer in answers for gap in answer.gaps)
            whole = waits(answer.end - answer.sent for answer in answers)
            figures |= {f"{when}_first_p50": first["p50"], f"{when}_first_max": first["max"], f"{when}_whole": whole["p50"]}
            figures |= {f"{when}_gap_p50": gaps["p50"], f"{when}_gap_p99": gaps["p99"], f"{when}_gap_max": gaps["max"]}
        return figures

    def person(self, server):
        answers = []
        for _ in range(self.questions):
            ask = Ask(self.words.about(PERSON_PROMPT), PERSON_ANSWER, client="person", priority=self.priorities[0])
            answers.append(Call(server.url, ask).run())
            time.sleep(THINKING)
        return answers

    def agent_asks(self, shared):
        while True:
            prompt = f"{shared} {self.words.about(AGENT_OWN)}"
            yield Ask(prompt, AGENT_ANSWER, client="agent", priority=self.priorities[1])

    def agent(self, server, asks, stop, done, failed):
        """One of its requests after another, until it is stopped: then the one under way is cut off."""
        while not stop.is_set():
            call = Call(server.url, next(asks)).start()
            while call.thread.is_alive() and not stop.wait(0.02):
                pass
            if stop.is_set():
                call.close()
            answer = call.join()
            done.append(answer)
            if answer.outcome not in (DONE, CANCELLED):
                failed.append(answer)
                return

    def lines(self, sides):
        rows = []
        for when, title in (("alone", "the person alone"), ("beside", "beside the agent")):
            rows += [
                (f"{when}_first_p50", f"{title}: first token p50 ms", False),
                (f"{when}_first_max", "  longest", False),
                (f"{when}_gap_p50", "  between tokens: p50 ms", False),
                (f"{when}_gap_p99", "  p99", False),
                (f"{when}_gap_max", "  longest", False),
                (f"{when}_whole", "  whole answer p50 ms", False),
            ]
        rows.append(("agent_rate", "the agent's tokens/s meanwhile", True))
        yield from sides.table(rows)
        said = f"{self.questions} questions of {PERSON_PROMPT} + {PERSON_ANSWER} tokens; {self.parallel} requests of "
        said += f"{AGENT_PROMPT} shared and {AGENT_OWN} own + {AGENT_ANSWER} tokens"
        yield said + ("; X-Priority: interactive and background" if self.priorities[0] else "; no priorities")
        slowdown = quantile(sides.values[0]["beside_first_p50"], 0.5) / quantile(sides.values[0]["alone_first_p50"], 0.5)
        yield f"{sides.names[0]}: the person's first token comes {slowdown:.1f} times later than alone"
