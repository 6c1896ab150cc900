"""The official OpenAI client's audio against a running server with Whisper tiny.en.

Usage: openai_audio.py BASE_URL CLIP (jfk.wav: 16 kHz, 16 bits, mono). Exits non-zero at the first case that is not as it should be.
"""

import array
import base64
import sys
import wave

import openai

BASE, CLIP = sys.argv[1:3]
client = openai.OpenAI(base_url=BASE, websocket_base_url=BASE.replace("http", "ws", 1), api_key="none", max_retries=0, timeout=120)
MODEL = "whisper-1"
WORDS = "my fellow americans"


def transcribe(**fields):
    with open(CLIP, "rb") as clip:
        return client.audio.transcriptions.create(**({"model": MODEL, "file": clip} | fields))


def is_heard(text):
    assert WORDS in text.lower() and "country" in text.lower(), text


def formats():
    short = transcribe()
    is_heard(short.text)
    assert short.usage.type == "duration" and 10 < short.usage.seconds < 12, short
    assert transcribe(response_format="text").strip() == short.text
    assert "-->" in transcribe(response_format="srt")
    assert transcribe(response_format="vtt").startswith("WEBVTT")
    long = transcribe(response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert long.text == short.text and long.language == "english", long
    assert [segment.id for segment in long.segments] == list(range(len(long.segments)))
    words = {word.word.strip(" ,.?!").lower(): word for word in long.words}
    assert words["americans"].start <= 1.8 <= words["americans"].end, words
    told = transcribe(include=["logprobs"], language="en", prompt="A speech.", temperature=0)
    assert told.logprobs and all(entry.logprob <= 0 for entry in told.logprobs), told
    return short.text


def stream(expected):
    events = list(transcribe(stream=True))
    assert {event.type for event in events[:-1]} <= {"transcript.text.delta", "transcript.text.segment"}, events
    assert events[-1].type == "transcript.text.done" and events[-1].text == expected, events
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta").strip() == expected


def errors():
    def fails(kind, param, call):
        try:
            call()
        except kind as error:
            assert error.param == param and error.message, error
        else:
            raise AssertionError(f"{param} was accepted")

    bad = openai.BadRequestError
    fails(bad, "language", lambda: transcribe(language="klingon"))
    fails(bad, "response_format", lambda: transcribe(response_format="diarized_json"))
    fails(bad, "file", lambda: client.audio.transcriptions.create(model=MODEL, file=("talk.wav", b"RIFF")))
    # An English-only model writes English only.
    with open(CLIP, "rb") as clip:
        fails(bad, "task", lambda: client.audio.translations.create(model=MODEL, file=clip))
    fails(openai.NotFoundError, "model", lambda: transcribe(model="whisper-huge"))


def realtime():
    with wave.open(CLIP) as clip:
        samples = array.array("h", clip.readframes(clip.getnframes()))
    # 16 to 24 kHz, in straight lines.
    wider = array.array("h")
    for a, b, c in zip(samples[::2], samples[1::2], samples[2::2]):
        wider.extend((a, (a + 2 * b) // 3, (2 * b + c) // 3))
    silence = bytes(2 * 24_000)
    audio = wider.tobytes() + silence
    deltas, finals, kinds = "", [], []
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24_000},
                        "transcription": {"model": MODEL, "language": "en"},
                        "turn_detection": {"type": "server_vad", "silence_duration_ms": 700},
                    }
                },
            }
        )
        for at in range(0, len(audio), 24_000):
            connection.input_audio_buffer.append(audio=base64.b64encode(audio[at : at + 24_000]).decode())
        for event in connection:
            kinds.append(event.type)
            if event.type == "error":
                raise AssertionError(event)
            if event.type == "conversation.item.input_audio_transcription.delta":
                deltas += event.delta + " "
            if event.type == "conversation.item.input_audio_transcription.completed":
                finals.append(event.transcript)
                if "country" in event.transcript and event.transcript.rstrip(".").endswith("your country"):
                    break
    is_heard(" ".join(finals))
    is_heard(deltas)
    for kind in ("session.created", "session.updated", "input_audio_buffer.speech_started", "input_audio_buffer.committed"):
        assert kind in kinds, kinds


def models():
    assert any("whisper" in model.id for model in client.models.list())


text = formats()
for case in (lambda: stream(text), errors, models, realtime):
    case()
print("the official client is heard:", openai.__version__)
