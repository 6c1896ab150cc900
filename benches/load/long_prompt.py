"""A long prompt arrives while others stream: what it does to their tokens, and how long it waits itself."""

import time

from client import CANCELLED, Ask, Call
from figures import quantile, ratio, waits
from server_pair import Shape, check

PROMPT = 100  # tokens before a stream
SETTLED = 20  # pieces of a stream that are not counted: its own prompt was being computed beside others
BEFORE = 200  # pieces of each stream before the long prompt arrives
AFTER = 5.0  # seconds that the streams go on once it is answered: longer by then, they cost more than before
LONG_ANSWER = 16
STREAM_LIMIT = 180.0  # seconds until the streams must have come so far


class LongPrompt:
    """Four streams, then a prompt of 4,000 tokens."""

    name = "long"
    title = "a long prompt arrives while others stream"

    def __init__(self, args, words):
        self.long, self.streams, self.words = args.long, args.streams, words
        self.before = min(BEFORE, max(SETTLED + 20, args.long // 20))
        # The streams must not end before the long prompt's first token: room for what a fast server makes of them meanwhile.
        self.tokens = self.before + self.long + round(AFTER * 100)
        each = max(PROMPT + self.tokens, self.long + LONG_ANSWER) * 5 // 4 + 64
        self.shape = Shape(slots=self.streams + 1, context=each)

    def run(self, server):
        """One round; figures by name."""
        alone = Call(server.url, self.ask(self.long, LONG_ANSWER)).run()
        check(server, alone)
        calls = [Call(server.url, self.ask(PROMPT, self.tokens)).start() for _ in range(self.streams)]
        try:
            deadline = time.monotonic() + STREAM_LIMIT
            while not all(len(call.answer.times) >= self.before for call in calls):
                if time.monotonic() > deadline or not all(call.thread.is_alive() for call in calls):
                    raise RuntimeError(f"{server.name}: the streams did not come to {self.before} tokens: {[call.answer.error for call in calls]}")
                time.sleep(0.005)
            long = Call(server.url, self.ask(self.long, LONG_ANSWER)).run()
            check(server, long)
            # A silence that the prompt left behind must be able to end, and what follows is compared with.
            time.sleep(AFTER)
        finally:
            for call in calls:
                call.close()
            answers = [call.join() for call in calls]
        return self.figures(alone, long, answers)

    def ask(self, prompt, tokens):
        return Ask(self.words.about(prompt), tokens)

    def figures(self, alone, long, answers):
        sent, first = long.sent, long.times[0]
        before, during, after, meanwhile = [], [], [], 0
        answered = long.end
        for answer in answers:
            times = answer.times
            # What is silent until it is cut off was silent until then.
            spans = [*zip(times[SETTLED:], times[SETTLED + 1 :]), (times[-1], answer.end)]
            before += [b - a for a, b in spans if b <= sent]
            during += [b - a for a, b in spans if b > sent and a < first]
            after += [b - a for a, b in spans[:-1] if a >= answered]
            meanwhile += sum(sent < at <= first for at in times)
        ended_early = sum(answer.outcome != CANCELLED for answer in answers)
        before, during, after = waits(before), waits(during), waits(after)
        return {
            "before_p50": before["p50"],
            "before_p99": before["p99"],
            "before_max": before["max"],
            "during_p50": during["p50"],
            "during_p99": during["p99"],
            "during_max": during["max"],
            "after_p50": after["p50"],
            "after_p99": after["p99"],
            "growth": ratio(during["p99"], (before["p99"] + after["p99"]) / 2),
            "meanwhile": meanwhile / (first - sent),
            "long_first": 1e3 * long.first,
            "alone_first": 1e3 * alone.first,
            "long_tokens": long.prompt_tokens,
            "streams_ended": ended_early,
        }

    def lines(self, sides):
        """The table of medians, and a line of what was asked."""
        rows = [
            ("before_p50", "between tokens, before: p50 ms", False),
            ("before_p99", "  p99", False),
            ("before_max", "  longest", False),
            ("during_p50", "while it is computed: p50 ms", False),
            ("during_p99", "  p99", False),
            ("during_max", "  longest silence", False),
            ("after_p50", "after it: p50 ms", False),
            ("after_p99", "  p99", False),
            ("growth", "p99 during by the mean of before and after", False),
            ("meanwhile", "tokens/s of all streams meanwhile", True),
            ("long_first", "the prompt's first token after ms", False),
            ("alone_first", "  without streams", False),
        ]
        yield from sides.table(rows)
        tokens = quantile(sides.values[0]["long_tokens"], 0.5)
        yield f"{self.streams} streams of {self.before} tokens so far; a prompt of {tokens:.0f} tokens"
        for side, values in zip(sides.names, sides.values):
            if any(values["streams_ended"]):
                yield f"{side}: streams ended before they were closed"

