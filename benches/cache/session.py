#!/usr/bin/env python3
"""The requests of a coding agent's session: a long system prompt, tools, and turns of calls and short answers.

    python3 session.py --json                      the bodies for /v1/chat/completions, one JSON array
    python3 session.py --tokenizer tokenizer.json  how long they are; without a tokenizer 4 characters a token

A replay: what the assistant said is recorded, so each request holds the one before it whole, whatever a server answered. The same
arguments give the same bytes everywhere. They fit a context of 8192 of SmolLM2's tokens.

Templates that print no calls refuse them. The plain form therefore writes tools, calls and what they answered as text; `calls="openai"`
has them in OpenAI's shape, for models whose template knows them.
"""

import argparse
import json
import random
from pathlib import Path

TURNS = 40
MOST_TOKENS = 8000
INSTRUCTIONS = Path(__file__).resolve().parent / "instructions.md"
SESSION = "bench-session"
OTHER_SESSION = "bench-other"

TASK = "The board showed order 4711 as on time last night, but its lorry left without it. Find out why, and mend it. The log is in logs/board.txt."
OTHER_TASK = "How long may a picker stay in the deep-frozen zone, and which file checks that a second time? Answer without calling a tool."

CALL_FORM = "A call is one line: the tool's name and its arguments as JSON. The answer comes behind the name and an arrow. There are:"

# What the project's files are said to be: folder, suffix, names and what each is about.
PARTS = [
    ("intake", "py", "orders shops carriers parcels weights labels limits retries schema snapshot addresses holidays"),
    ("planner", "py", "solver aisles docks breaks shifts zones waves guard scoring publish compare wiring"),
    ("board/src", "ts", "state wire clock sounds rows lamps socket colours pages keys"),
    ("queue", "py", "append claim expire replay audit locks"),
    ("tests", "py", "make cases reference timing seeds recordings nights borders"),
    ("ops", "sh", "backup restore rotate deploy drain"),
]
ROLES = [
    "keeps {a} apart from {b}, and is the only place that may join them",
    "turns {a} into {b}; pure, and called once a snapshot",
    "decides which {a} come first when {b} are scarce",
    "reads {a} in one pass and refuses {b} that nobody ordered",
    "counts {a}; the numbers end in the morning report beside {b}",
    "was split off when {a} grew too slow; still knows too much of {b}",
    "checks {a} against {b} and names the first that differs",
    "holds {a} in memory for the length of a shift and drops {b} at its end",
    "has the table of {a}; a new row needs a test with {b}",
    "explains to people why {a} were moved behind {b}",
    "maps {a} of the old system to {b}; to go when the last shop has moved",
    "waits for {a}, at most a minute, and goes on without {b}",
]
THINGS = (
    "pallets, crates, door faults, late orders, frozen goods, loading slots, picker pairs, forklifts, cancelled lines, substitutes, empty racks, "
    "lorries, seals, thermometer readings, scanner events, route numbers, delivery notes, returns, hazard labels, partial picks, shop closures, "
    "break times, night surcharges, aisle locks, missing barcodes, double scans, spare docks, tare weights, batch numbers, best-before dates"
).split(", ")
OWNERS = "Ada Bram Chidi Dunja Emeka Freya Goran Hanne Imran Jolanta".split()
HABITS = [
    "slow tests: {n} s",
    "changed {n} times this year",
    "{n} lines",
    "bug {n} is still open",
    "covered by {n} cases",
    "allocates {n} MB at most",
    "must answer within {n} ms",
    "generated before version {n}, by hand since",
]

# Each tool: name, what it does, and its arguments with what each means. The last argument may be left out.
TOOLS = [
    ("read_file", "Lines of a file, numbered.", {"path": "from the root", "lines": "a range such as 10-40"}),
    ("edit_file", "Replaces a passage that occurs once.", {"path": "from the root", "old": "the passage", "new": "what takes its place"}),
    ("create_file", "Writes a file that is not there yet.", {"path": "from the root", "text": "all of it"}),
    ("list_folder", "Names in a folder, folders with a slash.", {"path": "from the root", "depth": "levels, 1 without it"}),
    ("search_text", "Lines that match a regular expression.", {"pattern": "Python's syntax", "path": "where to look"}),
    ("run_command", "Runs a command without a terminal.", {"command": "for bash", "seconds": "limit, at most 120"}),
    ("run_tests", "Runs tests and says which failed.", {"path": "a file or folder of tests", "name": "one test of it"}),
    ("show_diff", "What has changed since the last commit.", {"path": "a file, or all without it"}),
]

# What a call may be and answer, in turn; {p} is a file, {r} one of tests, {n} and {m} are numbers, {t} a thing, {w} an identifier.
CALLS = [
    ("search_text", {"pattern": "{w}"}, "{p}:{n}: {w}(order)"),
    ("read_file", {"path": "{p}", "lines": "{n}-{m}"}, "{n}  return order.due - {w} > {k}"),
    ("run_command", {"command": "grep -c {w} logs/board.txt"}, "exit 0 after 0.{k} s\n{n}"),
    ("run_tests", {"path": "{r}"}, "{n} passed, 1 failed: test_a_{w}_is_late"),
    ("edit_file", {"path": "{p}", "old": "> {k}", "new": ">= {k}"}, "1 passage replaced in line {n}"),
    ("list_folder", {"path": "{d}"}, "{w}.py\n{w}.sql\nREADME.md"),
    ("show_diff", {}, "{p} | {k} lines added, 2 removed"),
    ("run_tests", {"path": "{r}", "name": "{w}"}, "1 passed; {n} were left out"),
]
SAID = [
    ("The {t} and the {u} share one deadline here, so a late lorry hides behind a punctual one.", "Go on, but leave the {t} alone as they are."),
    ("I follow the reading in which line {n} compares seconds with minutes.", "Right. Is {p} touched by that as well?"),
    ("It is: {p} takes the same value for its {t}.", "Then mend both, and add a case for {u}."),
    ("The test fails without the fix, as it should: {n} instead of {m}.", "Good. Which commit brought that in, and when?"),
    ("Both are mended; {n} tests pass and the linter is quiet.", "Please check the {t} once more, with {u}."),
]
SAID_EACH = 6  # turns, of which one is spoken
VERBS = "due left sealed shown late moved held picked loaded freed".split()
NOUNS = "order dock slot shift wave lorry zone aisle crate seal".split()


def requests(turns=TURNS, calls="text"):
    """The session's requests: number n has what was said up to its turn n, which is somebody's or a tool's."""
    messages, bodies = [user(TASK)], []
    chance = random.Random(7)
    for turn in range(turns):
        if turn:
            messages += exchange(turn, chance, calls)
        bodies.append(body(messages, SESSION, calls))
    return bodies


def other_question(calls="text"):
    """Another conversation that begins with the same system prompt."""
    return body([user(OTHER_TASK)], OTHER_SESSION, calls)


def body(messages, session, calls):
    request = {"messages": [{"role": "system", "content": system_prompt(calls)}, *messages]}
    if calls == "openai":
        request["tools"] = tools()
    return request | {"max_tokens": 8, "temperature": 0, "session_id": session}


def system_prompt(calls="text"):
    text = INSTRUCTIONS.read_text(encoding="utf-8").rstrip()
    described = [] if calls == "openai" else [CALL_FORM, *map(compact, tools())]
    return "\n".join([text, *described, "", "# The repository", "", *repository()])


def tools():
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": does,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string", "description": means} for key, means in arguments.items()},
                    "required": list(arguments)[:-1],
                },
            },
        }
        for name, does, arguments in TOOLS
    ]


def files():
    return [f"{folder}/{name}.{suffix}" for folder, suffix, names in PARTS for name in names.split()]


def repository():
    """A line on each file; no two are alike."""
    chance, roles = random.Random(5), []
    for path in files():
        roles = roles or chance.sample(ROLES, len(ROLES))
        a, b = chance.sample(THINGS, 2)
        habit = chance.choice(HABITS).format(n=chance.randrange(3, 900))
        yield f"- `{path}` {roles.pop().format(a=a, b=b)}. Ask {chance.choice(OWNERS)}; {habit}."


def exchange(turn, chance, calls):
    """What the assistant said, and what came back."""
    names = fillings(chance)
    if turn % SAID_EACH == SAID_EACH - 1:
        said, asked = SAID[turn // SAID_EACH % len(SAID)]
        return [{"role": "assistant", "content": said.format(**names)}, user(asked.format(**names))]
    name, arguments, answer = CALLS[(turn - 1 - turn // SAID_EACH) % len(CALLS)]
    arguments = {key: value.format(**names) for key, value in arguments.items()}
    answer = answer.format(**names)
    if calls == "openai":
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": compact(arguments)}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [asked, {"role": "tool", "tool_call_id": call["id"], "content": answer}]
    return [{"role": "assistant", "content": f"{name} {compact(arguments)}"}, user(f"{name} -> {answer}")]


def fillings(chance):
    p, r = chance.choice(files()), chance.choice([path for path in files() if path.startswith("tests/")])
    n, k = chance.randrange(10, 400), chance.randrange(2, 60)
    t, u = chance.sample(THINGS, 2)
    w = f"{chance.choice(NOUNS)}_{chance.choice(VERBS)}"
    return {"p": p, "r": r, "d": p.rpartition("/")[0], "n": n, "m": n + chance.randrange(4, 30), "k": k, "t": t, "u": u, "w": w}


def user(text):
    return {"role": "user", "content": text}


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def rendered(request):
    """A request as the demo model's template prints it."""
    spoken = [f"<|im_start|>{message['role']}\n{message['content'] or compact(message.get('tool_calls'))}<|im_end|>\n" for message in request["messages"]]
    return "".join(spoken) + "<|im_start|>assistant\n"


def counter(tokenizer=None):
    """A function that counts a text's tokens, or estimates them where there is no tokenizer.json."""
    if not tokenizer:
        return lambda text: len(text) // 4
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(tokenizer))
    return lambda text: len(known.encode(text, add_special_tokens=False).ids)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=TURNS, help=f"requests of the session (default: {TURNS})")
    parser.add_argument("--calls", choices=["text", "openai"], default="text", help="how calls are written (default: text)")
    parser.add_argument("--json", action="store_true", help="print the bodies")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to count with; needs PyPI's tokenizers")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error("--turns is at least 1")
    bodies = requests(args.turns, args.calls)
    if args.json:
        print(json.dumps(bodies, indent=1))
        return
    count = counter(args.tokenizer)
    sizes = [count(rendered(request)) for request in bodies]
    added = sorted(after - before for before, after in zip(sizes, sizes[1:]))
    print(f"system prompt {count(system_prompt(args.calls))} tokens, of which tools {count(' '.join(map(compact, tools())))}" + (" (estimated)" if not args.tokenizer else ""))
    print(f"requests {len(sizes)}: first {sizes[0]}, last {sizes[-1]}; a turn adds {added[0]} to {added[-1]}" if added else f"one request: {sizes[0]}")
    if args.tokenizer and sizes[-1] > MOST_TOKENS:
        parser.error(f"the last request has more than {MOST_TOKENS} tokens")


if __name__ == "__main__":
    main()
