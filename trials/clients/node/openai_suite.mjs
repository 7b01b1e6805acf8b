// The `openai` package of Node: chat, streams, its stream helper, zod schemas, and its tool runner.
// Answers are short because their schemas bound them: what is tested is the client, not the model's wit.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.LLMBACKEND_CLIENTS_URL}/v1`, apiKey: "none", maxRetries: 0 });
const plain = { model: "demo", temperature: 0, messages: [{ role: "user", content: "Who are you?" }] };
const Mood = z.object({ mood: z.enum(["good", "bad"]), points: z.number().int().min(0).max(9) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "get_weather", description: "Get the weather", parameters } };

test("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes("demo"));
});

test("chat", async () => {
  const answer = await client.chat.completions.create(plain);
  assert.ok(answer.choices[0].message.content);
  assert.ok(answer.usage.completion_tokens > 0);
});

test("a stream is the whole answer", async () => {
  const whole = await client.chat.completions.create(plain);
  const stream = await client.chat.completions.create({ ...plain, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
});

test("the stream helper", async () => {
  const whole = await client.chat.completions.create(plain);
  const stream = client.chat.completions.stream({ ...plain, stream_options: { include_usage: true } });
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  assert.deepEqual(await stream.totalUsage(), await stream.totalUsage());
});

test("a stream that is aborted", async () => {
  const stream = await client.chat.completions.create({ ...plain, stream: true, max_tokens: 500, ignore_eos: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  assert.ok((await client.chat.completions.create({ ...plain, max_tokens: 2 })).id);
});

test("an error has its class and its field", async () => {
  await assert.rejects(client.chat.completions.create({ ...plain, temperature: -3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
});

test("completions", async () => {
  const answer = await client.completions.create({ model: "demo", prompt: "one two", ignore_eos: true, max_tokens: 5 });
  assert.equal(answer.usage.completion_tokens, 5);
});

test("parse with a zod schema", async () => {
  const answer = await client.chat.completions.parse({ ...plain, response_format: zodResponseFormat(Mood, "mood") });
  assert.ok(Mood.parse(answer.choices[0].message.parsed));
});

test("the stream helper parses", async () => {
  const stream = client.chat.completions.stream({ ...plain, response_format: zodResponseFormat(Mood, "mood") });
  const final = await stream.finalChatCompletion();
  assert.ok(Mood.parse(final.choices[0].message.parsed));
});

test("a required tool, whole and streamed", async () => {
  const asked = { ...plain, tools: [weather], tool_choice: "required", parallel_tool_calls: false };
  const whole = (await client.chat.completions.create(asked)).choices[0];
  const final = (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0];
  assert.equal(whole.finish_reason, "tool_calls");
  assert.equal(final.finish_reason, "tool_calls");
  assert.deepEqual(final.message.tool_calls[0].function.arguments, whole.message.tool_calls[0].function.arguments);
  assert.ok(["Paris", "Rome"].includes(JSON.parse(whole.message.tool_calls[0].function.arguments).city));
});

test("the tool runner", async () => {
  const seen = [];
  const run = (city) => {
    seen.push(city);
    return "sunny";
  };
  const tool = { type: "function", function: { ...weather.function, parse: JSON.parse, function: run } };
  const choice = { type: "function", function: { name: "get_weather" } };
  const runner = client.chat.completions.runTools({ ...plain, tools: [tool], tool_choice: choice });
  await runner.done();
  assert.ok(["Paris", "Rome"].includes(seen[0].city));
});

test("the streaming tool runner", async () => {
  const seen = [];
  const run = (city) => {
    seen.push(city);
    return "sunny";
  };
  const tool = { type: "function", function: { ...weather.function, parse: JSON.parse, function: run } };
  const choice = { type: "function", function: { name: "get_weather" } };
  const runner = client.chat.completions.runTools({ ...plain, stream: true, tools: [tool], tool_choice: choice });
  await runner.done();
  assert.ok(["Paris", "Rome"].includes(seen[0].city));
});
