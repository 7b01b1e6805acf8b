// The `openai` package of Node over /v1/responses and /v1/conversations.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.LLMBACKEND_CLIENTS_URL}/v1`, apiKey: "none", maxRetries: 0 });
const plain = { model: "demo", temperature: 0, input: "Who are you?" };
const Mood = z.object({ mood: z.enum(["good", "bad"]), points: z.number().int().min(0).max(9) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { type: "function", name: "get_weather", description: "Get the weather", strict: true, parameters };

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

test("create", async () => {
  const answer = await client.responses.create(plain);
  assert.equal(answer.status, "completed");
  assert.ok(answer.output_text && answer.usage.output_tokens > 0);
});

test("a stream is the whole answer", async () => {
  const whole = await client.responses.create(plain);
  const events = await all(await client.responses.create({ ...plain, stream: true }));
  const text = events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta);
  assert.equal(text.join(""), whole.output_text);
  assert.deepEqual(events.map((e) => e.sequence_number), [...events.keys()]);
  assert.equal(events.at(-1).type, "response.completed");
});

test("the stream helper", async () => {
  const whole = await client.responses.create(plain);
  const final = await client.responses.stream(plain).finalResponse();
  assert.equal(final.output[0].content[0].text, whole.output_text);
});

test("parse", async () => {
  const answer = await client.responses.parse({ ...plain, text: { format: zodTextFormat(Mood, "mood") } });
  assert.ok(["good", "bad"].includes(answer.output_parsed.mood));
});

test("a function and its result", async () => {
  const answer = await client.responses.create({ ...plain, tools: [weather], tool_choice: "required" });
  const calls = answer.output.filter((item) => item.type === "function_call");
  assert.ok(["Paris", "Rome"].includes(JSON.parse(calls[0].arguments).city));
  const results = calls.map((c) => ({ type: "function_call_output", call_id: c.call_id, output: "sunny" }));
  const input = [{ role: "user", content: "Weather?" }, ...answer.output, ...results];
  assert.ok((await client.responses.create({ ...plain, input, tools: [weather], tool_choice: "none" })).output_text);
});

test("retrieve, input items, delete", async () => {
  const made = await client.responses.create(plain);
  assert.equal((await client.responses.retrieve(made.id)).output_text, made.output_text);
  const items = await all(client.responses.inputItems.list(made.id));
  assert.equal(items.length, 1);
  await client.responses.delete(made.id);
  await assert.rejects(client.responses.retrieve(made.id), OpenAI.NotFoundError);
});

test("a background response is read on", async () => {
  const stream = await client.responses.create({ ...plain, background: true, stream: true });
  const first = [];
  for await (const event of stream) {
    first.push(event);
    if (first.length === 4) break;
  }
  const cursor = first.at(-1).sequence_number;
  const rest = await all(
    await client.responses.retrieve(first[0].response.id, { stream: true, starting_after: cursor }),
  );
  assert.deepEqual(rest.map((e) => e.sequence_number), rest.map((_, i) => cursor + 1 + i));
  assert.equal(rest.at(-1).type, "response.completed");
});

test("cancel", async () => {
  const made = await client.responses.create({ ...plain, background: true, max_output_tokens: 800, ignore_eos: true });
  await client.responses.cancel(made.id);
  let found = made;
  while (["queued", "in_progress"].includes(found.status)) found = await client.responses.retrieve(made.id);
  assert.equal(found.status, "cancelled");
});

test("conversations", async () => {
  const made = await client.conversations.create({ metadata: { topic: "x" } });
  await client.responses.create({ ...plain, conversation: made.id });
  const items = await all(client.conversations.items.list(made.id));
  assert.equal(items.length, 2);
  await client.conversations.delete(made.id);
  await assert.rejects(client.conversations.retrieve(made.id), OpenAI.NotFoundError);
});

test("an error has its class and its field", async () => {
  await assert.rejects(client.responses.create({ ...plain, temperature: -3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
});
