"""The official Anthropic client against a running server with the demo model.

Usage: anthropic_client.py BASE_URL (without /v1). Exits non-zero at the first case that is not as it should be.
"""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="not needed", max_retries=0, timeout=120)
ASK = {"model": "default", "max_tokens": 24, "extra_body": {"temperature": 0}, "messages": [{"role": "user", "content": "What is the capital of France?"}]}


def whole():
    message = client.messages.create(**ASK)
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_"), message
    assert message.content[0].type == "text" and message.content[0].text, message
    assert message.stop_reason in ("end_turn", "max_tokens"), message
    assert message.usage.input_tokens > 5 and 0 < message.usage.output_tokens <= 24, message
    return message.content[0].text


def stream(expected):
    with client.messages.stream(**ASK) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == expected == final.content[0].text, (text, expected, final)
    assert final.usage.output_tokens > 0 and final.stop_reason, final


def stop(expected):
    word = expected.split()[1]
    message = client.messages.create(**ASK | {"stop_sequences": [word]})
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == word, message
    assert message.content[0].text == expected.split(word)[0], message


def blocks():
    system = [{"type": "text", "text": "Answer in one word.", "cache_control": {"type": "ephemeral"}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "user", "content": "And now?"},
    ]
    message = client.messages.create(**ASK | {"system": system, "messages": turns})
    assert message.content[0].text, message


def count():
    fields = {key: ASK[key] for key in ("model", "messages")}
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(**ASK).usage
    charged = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert counted == charged, (counted, usage)


def errors():
    def fails(kind, word, **fields):
        try:
            client.messages.create(**ASK | fields)
        except kind as error:
            assert word in str(error) and error.body["error"]["type"], error
        else:
            raise AssertionError(f"{fields} was accepted")

    fails(anthropic.NotFoundError, "claude", model="claude")
    fails(anthropic.BadRequestError, "temperature", extra_body={"temperature": -1})
    fails(anthropic.BadRequestError, "tokens", messages=[{"role": "user", "content": "word " * 20000}])
    fails(anthropic.BadRequestError, "messages[0].content[0].type", messages=[{"role": "user", "content": [{"type": "document", "source": {}}]}])


def cancel():
    with client.messages.stream(**ASK | {"max_tokens": 2000}) as events:
        for number, _ in enumerate(events.text_stream):
            if number == 3:
                break


text = whole()
for case in (lambda: stream(text), lambda: stop(text), blocks, count, errors, cancel):
    case()
print("Anthropic's client is served:", anthropic.__version__)
