const response = await fetch("http://127.0.0.1:8080/v1/chat/completions", {
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify({
    messages: [{ role: "user", content: "Write a haiku about rain." }],
    max_tokens: 200,
  }),
});
const answer = await response.json();
console.log(answer.choices[0].message.content);
