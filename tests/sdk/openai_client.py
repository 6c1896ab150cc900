"""The official OpenAI client against a running server.

Usage: openai_client.py BASE_URL. Exits non-zero at the first case that is not as it should be.
"""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="not needed", max_retries=0, timeout=120)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS = {"ignore_eos": True}


def whole():
    answer = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=24)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-"), answer
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content, answer
    assert choice.finish_reason in ("stop", "length"), answer
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert usage.prompt_tokens_details.cached_tokens >= 0, usage
    assert answer._request_id, "x-request-id"
    return choice.message.content


def stream(expected):
    text, finishes = "", []
    chunks = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=24, stream=True)
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk" and chunk.usage is None, chunk
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        finishes += [choice.finish_reason] if choice.finish_reason else []
    assert text == expected, (text, expected)
    assert len(finishes) == 1, finishes


def include_usage():
    chunks = list(
        client.chat.completions.create(
            model="default", messages=QUESTION, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    extra = [chunk for chunk in chunks if not chunk.choices]
    assert len(extra) == 1 and chunks[-1] is extra[0], chunks
    assert extra[0].usage.completion_tokens == 8, extra[0]
    assert all(chunk.usage is None for chunk in chunks[:-1])


def stop(expected):
    word = expected.split()[1]
    answer = client.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, max_tokens=24, stop=[word, "never seen"]
    )
    assert answer.choices[0].finish_reason == "stop", answer
    assert answer.choices[0].message.content == expected.split(word)[0], answer


def errors():
    def fails(kind, code, **fields):
        request = {"model": "default", "messages": QUESTION} | fields
        try:
            client.chat.completions.create(**request)
        except kind as error:
            assert error.code == code, (error.code, code)
            assert error.type and error.message, error
            return error
        raise AssertionError(f"{fields} was accepted")

    assert fails(openai.BadRequestError, "invalid_value", n=17).param == "n"
    assert fails(openai.BadRequestError, "invalid_value", temperature=-1).param == "temperature"
    assert fails(openai.NotFoundError, "model_not_found", model="gpt-5").param == "model"
    long = [{"role": "user", "content": "word " * 20000}]
    fails(openai.BadRequestError, "context_length_exceeded", messages=long)
    try:
        client.audio.transcriptions.create(model="whisper-1", file=("a.wav", b"RIFF"))
    except openai.APIStatusError as error:
        assert error.code == "not_available", error
    else:
        raise AssertionError("there is no speech model")


def cancel():
    chunks = client.chat.completions.create(
        model="default", messages=QUESTION, stream=True, max_tokens=4000, extra_body=ENDLESS
    )
    for number, _ in enumerate(chunks):
        if number == 3:
            break
    chunks.close()


def continued():
    request = {"model": "default", "prompt": "Once upon a", "temperature": 0}
    answer = client.completions.create(**request)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-"), answer
    assert answer.choices[0].text and answer.usage.completion_tokens <= 16, answer
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text, chunks
    assert chunks[-1].choices[0].finish_reason in ("stop", "length"), chunks


def several():
    answer = client.chat.completions.create(model="default", messages=QUESTION, max_tokens=8, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2], answer
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert bytes(byte for token in tokens for byte in token.bytes).decode(errors="replace") == choice.message.content, choice
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens), choice


def responses():
    first = client.responses.create(model="default", input="What is the capital of France?", temperature=0, max_output_tokens=24)
    assert first.output_text and first.status in ("completed", "incomplete"), first
    with client.responses.stream(model="default", input="And of Italy?", previous_response_id=first.id, max_output_tokens=16) as events:
        seen = list(events)
    kinds, final = [event.type for event in seen], seen[-1].response
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds, kinds
    assert kinds[-1] == f"response.{final.status}" and final.status in ("completed", "incomplete"), kinds
    assert final.output_text and client.responses.retrieve(final.id).output_text == final.output_text, final
    client.responses.delete(final.id)
    try:
        client.responses.retrieve(final.id)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("it was deleted")


def models():
    listed = list(client.models.list())
    assert len(listed) == 1 and listed[0].object == "model", listed
    assert client.models.retrieve(listed[0].id).id == listed[0].id


text = whole()
for case in (lambda: stream(text), include_usage, lambda: stop(text), errors, cancel, continued, several, responses, models):
    case()
print("the official client is served:", openai.__version__)
