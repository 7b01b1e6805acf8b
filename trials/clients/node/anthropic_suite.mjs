// The `@anthropic-ai/sdk` package of Node: messages, streams and their helper, tools, counts, errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.LLMBACKEND_CLIENTS_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Who are you?" }];
const plain = { model: "demo", temperature: 0, max_tokens: 200, messages };
const input_schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { name: "get_weather", description: "Get the weather", input_schema };

test("create", async () => {
  const answer = await client.messages.create(plain);
  assert.equal(answer.stop_reason, "end_turn");
  assert.ok(answer.content[0].text && answer.usage.output_tokens > 0);
});

test("a stream is the whole answer", async () => {
  const whole = await client.messages.create(plain);
  let text = "";
  for await (const event of await client.messages.create({ ...plain, stream: true }))
    if (event.type === "content_block_delta") text += event.delta.text;
  assert.equal(text, whole.content[0].text);
});

test("the stream helper", async () => {
  const whole = await client.messages.create(plain);
  const stream = client.messages.stream(plain);
  assert.equal(await stream.finalText(), whole.content[0].text);
  assert.deepEqual((await stream.finalMessage()).usage.output_tokens, whole.usage.output_tokens);
});

test("a tool and its result", async () => {
  const answer = await client.messages.create({ ...plain, tools: [weather], tool_choice: { type: "any" } });
  assert.equal(answer.stop_reason, "tool_use");
  const calls = answer.content.filter((block) => block.type === "tool_use");
  assert.ok(["Paris", "Rome"].includes(calls[0].input.city));
  const content = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "sunny" }));
  const more = [...messages, { role: "assistant", content: answer.content }, { role: "user", content }];
  const last = await client.messages.create({ ...plain, messages: more, tools: [weather], tool_choice: { type: "none" } });
  assert.ok(last.content[0].text);
});

test("a streamed tool", async () => {
  const stream = client.messages.stream({ ...plain, tools: [weather], tool_choice: { type: "any" } });
  const calls = (await stream.finalMessage()).content.filter((block) => block.type === "tool_use");
  assert.ok(["Paris", "Rome"].includes(calls[0].input.city));
});

test("count tokens", async () => {
  const { input_tokens } = await client.messages.countTokens({ model: "demo", messages });
  const { usage } = await client.messages.create(plain);
  assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

test("beta", async () => {
  const answer = await client.beta.messages.create({ ...plain, betas: ["interleaved-thinking-2025-05-14"] });
  assert.ok(answer.content[0].text);
});

test("errors", async () => {
  await assert.rejects(client.messages.create({ ...plain, temperature: -3 }), (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError);
    assert.equal(error.error.error.type, "invalid_request_error");
    assert.match(error.message, /temperature/);
    return true;
  });
  await assert.rejects(client.messages.create({ ...plain, model: "absent" }), Anthropic.NotFoundError);
});

test("a stream that is aborted", async () => {
  const stream = client.messages.stream({ ...plain, max_tokens: 800 });
  for await (const event of stream) {
    assert.ok(event.type);
    break;
  }
  stream.abort();
  assert.ok((await client.messages.create({ ...plain, max_tokens: 2 })).id);
});
