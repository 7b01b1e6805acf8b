/** The page's actions, through the server's public endpoints. Each returns "" or an error text. */

import { refusalText } from "./feed_client.js";

/** Concurrent requests: browsers open at most six connections to a server, one of which the feed uses. */
const NUM_CALLS = 4;
const PROMPTS_PER_CALL = 4;

const DEMO_PROMPTS = [
  "What is continuous batching?",
  "Count from 1 to 20.",
  "List five fruits.",
  "What is a KV block?",
  "Who are you?",
  "How are requests scheduled?",
  "Explain preemption in one sentence.",
  "What does the prefix cache do?",
];

export async function killEngine({ model, version, instance }, headers) {
  const path = [model, version, instance].map(encodeURIComponent).join("/");
  return post(`/v2/engine/instances/${path}/kill`, undefined, headers);
}

export async function cancelRequest(request, headers) {
  return post(`/v2/engine/requests/${encodeURIComponent(request)}/cancel`, undefined, headers);
}

/** Sends 16 requests of different lengths; their answers are discarded. */
export async function sendDemoRequests({ model, limits }, headers) {
  const room = Math.max(32, (limits?.max_model_len ?? 1024) - 16);
  const bodies = Array.from({ length: NUM_CALLS }, (_, call) => demoCall(model, call, room));
  const failures = (await Promise.all(bodies.map((body) => post("/v1/completions", body, headers)))).filter(Boolean);
  return failures[0] ?? "";
}

function demoCall(model, call, room) {
  const prompts = Array.from(
    { length: PROMPTS_PER_CALL },
    (_, at) => DEMO_PROMPTS[(call + 2 * at) % DEMO_PROMPTS.length],
  );
  const prompt = call === NUM_CALLS - 1 ? prompts.map((_, at) => longPrompt(room, at)) : prompts;
  return { model, prompt, max_tokens: Math.min(Math.floor(room / 3), 64 + 56 * call), ignore_eos: true, seed: call };
}

/** Token ids that fill more than half of the context, so that prefill is chunked. All but the end is the same in each, so that
 * blocks are shared. Any vocabulary has these ids. */
function longPrompt(room, at) {
  return Array.from({ length: Math.floor(0.6 * room) }, (_, position) => 33 + ((position * 7) % 60)).concat(40 + at);
}

async function post(path, body, headers) {
  const request = {
    method: "POST",
    headers: { ...headers, "Content-Type": "application/json" },
    body: JSON.stringify(body ?? {}),
  };
  try {
    const answer = await fetch(path, request);
    if (!answer.ok) return await refusalText(answer);
    await answer.arrayBuffer();
    return "";
  } catch (error) {
    return `the server did not answer (${error.message})`;
  }
}
