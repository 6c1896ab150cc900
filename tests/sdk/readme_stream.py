from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="not needed")
stream = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "Write a haiku about rain."}],
    max_tokens=200,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
