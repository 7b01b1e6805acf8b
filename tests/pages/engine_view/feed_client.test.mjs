/** The feed's client against a real HTTP server: reads, connects again, stops where it is refused, ends when it is closed. */

import assert from "node:assert/strict";
import http from "node:http";
import { once } from "node:events";
import { test } from "node:test";

import { FeedClient } from "../../../llmbackend/pages/engine/view/feed_client.js";

/** Serves answers in turn: each a function of (request, response). Returns {url, close}. */
async function serve(...answers) {
  const server = http.createServer((request, response) => answers.shift()(request, response));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const close = () => {
    server.closeAllConnections();
    server.close();
  };
  return { url: `http://127.0.0.1:${server.address().port}/v2/engine/events`, close };
}

/** A client whose events and states come out one at a time, in order. */
function connect(url, headers = () => ({})) {
  const [told, waiting] = [[], []];
  const tell = (...what) => (waiting.length ? waiting.shift()(what) : told.push(what));
  const client = new FeedClient(url, { headers, onEvent: tell, onState: tell });
  const next = () => (told.length ? Promise.resolve(told.shift()) : new Promise((resolve) => waiting.push(resolve)));
  return { client, next, told };
}

function events(response, ...texts) {
  response.writeHead(200, { "content-type": "text/event-stream" });
  for (const text of texts) response.write(text);
}

test("reads events, and connects again when the connection ends", async () => {
  const keys = [];
  const first = (request, response) => {
    keys.push(request.headers.authorization);
    events(response, "event: a\nda", "ta: 1\n\n");
    response.end();
  };
  const busy = (request, response) => {
    response.writeHead(503, { "content-type": "application/json" });
    response.end('{"error": "too many viewers"}');
  };
  const second = (request, response) => {
    keys.push(request.headers.authorization);
    events(response, "event: b\ndata: 2\n\n");
  };
  const { url, close } = await serve(first, busy, second);
  let key = "one";
  const { client, next } = connect(url, () => ({ authorization: key }));
  const seen = [];
  for (let step = 0; step < 9; step++) {
    seen.push(await next());
    key = "two";
  }
  client.close();
  close();
  const [opened, lost, busy503, connecting] = [
    ["open", ""],
    ["lost", ""],
    ["lost", "503: too many viewers"],
    ["connecting", ""],
  ];
  const [a, b] = [
    ["a", 1, ""],
    ["b", 2, ""],
  ];
  assert.deepEqual(seen, [connecting, opened, a, lost, connecting, busy503, connecting, opened, b]);
  assert.deepEqual(keys, ["one", "two"]);
});

test("a refusal is told in the server's words, and not tried again", async () => {
  const { url, close } = await serve((request, response) => {
    response.writeHead(401, { "content-type": "application/json" });
    response.end('{"error": "a key is needed"}');
  });
  const { next } = connect(url);
  assert.deepEqual(
    [await next(), await next()],
    [
      ["connecting", ""],
      ["refused", "401: a key is needed"],
    ],
  );
  close();
});

test("nothing is told after close", async () => {
  let write;
  const { url, close } = await serve((request, response) => {
    events(response, "data: 1\n\n");
    write = () => response.write("data: 2\n\n");
  });
  const { client, next, told } = connect(url);
  while ((await next())[0] !== "message");
  client.close();
  write();
  await new Promise((resolve) => setTimeout(resolve, 50));
  close();
  assert.deepEqual(told, []);
});
