/**
 * A feed of an engine that is simulated step by step: prefill chunks, drafts, preemption, waiting, deaths. Seeded, so that each run
 * is the same.
 */

export const INSTANCE = { model: "demo", version: "1", instance: "demo_0" };
export const LIMITS = {
  max_num_seqs: 64,
  max_num_batched_tokens: 256,
  max_model_len: 1024,
  num_blocks: 2048,
  block_size: 16,
};

/** Numbers in [0, 1) from a seed (mulberry32). */
export function random(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

/** Yields [event, data] for `seconds` seconds with `concurrency` requests at a time. */
export function* simulatedFeed({ seed = 1, concurrency = 64, seconds = 10, killAt = null, start = 1_700_000_000 }) {
  const draw = random(seed);
  const requests = new Map();
  let [time, next, step] = [start, 1, 0];
  yield ["snapshot", snapshot(time)];
  while (time < start + seconds) {
    const received = [];
    while (requests.size < concurrency) {
      const request = newRequest(next++, time, draw);
      requests.set(request.request, { ...request, done: 0 });
      received.push(request);
    }
    if (received.length) yield ["requests", { ...INSTANCE, received, ended: [] }];
    if (killAt !== null && time >= start + killAt) {
      yield* death(time);
      time += 1;
      killAt = null;
      for (const request of requests.values()) request.done = 0;
    }
    const made = oneStep(requests, time, step++, draw);
    time += made.duration_ms / 1000;
    yield ["steps", { ...INSTANCE, steps: [made] }];
    const ended = finished(requests, time);
    if (ended.length) yield ["requests", { ...INSTANCE, received: [], ended }];
  }
}

export function snapshot(time, requests = [], state = "ready") {
  const instance = { ...INSTANCE, state, pid: 7, num_restarts: 0, limits: LIMITS, requests };
  return { time, server: { name: "triton", version: "2" }, scope: "all", allows_kill: false, instances: [instance] };
}

function newRequest(number, time, draw) {
  return {
    request: number,
    id: `r${number}`,
    received: time,
    prompt_tokens: 1 + Math.floor(draw() * 300),
    max_tokens: 1 + Math.floor(draw() * 100),
    state: "waiting",
    reason: "",
    output_tokens: 0,
  };
}

function* death(time) {
  yield [
    "engine",
    {
      ...INSTANCE,
      time,
      state: "recovering",
      reason: "killed by signal 9",
      pid: null,
      num_restarts: 0,
      recovery_ms: null,
    },
  ];
  yield [
    "engine",
    { ...INSTANCE, time: time + 1, state: "ready", reason: "", pid: 8, num_restarts: 1, recovery_ms: 1000 },
  ];
}

function oneStep(requests, time, step, draw) {
  let budget = LIMITS.max_num_batched_tokens;
  const [rows, preempted, waiting] = [[], [], []];
  for (const request of requests.values()) {
    if (request.state === "running" && draw() < 0.001) {
      Object.assign(request, { state: "waiting", done: 0 });
      preempted.push(request.request);
    } else if (budget <= 0) waiting.push([request.request, "token_budget"]);
    else budget -= row(request, budget, rows, draw);
  }
  const duration = 5 + draw() * 5;
  const parts = { schedule: duration * 0.1, run: duration * 0.8, commit: duration * 0.1 };
  const blocks = { used: 100 + rows.length, cached: 50, free: LIMITS.num_blocks - 150 - rows.length };
  return {
    step,
    time,
    duration_ms: duration,
    parts_ms: parts,
    rows,
    preempted,
    waiting,
    num_running: rows.length,
    num_waiting: waiting.length,
    blocks,
  };
}

function row(request, budget, rows, draw) {
  request.state = "running";
  const missing = request.prompt_tokens + request.output_tokens - request.done;
  if (missing > 0 && (request.done < request.prompt_tokens || missing > 1)) {
    const tokens = Math.min(budget, missing, 128);
    request.done += tokens;
    rows.push([request.request, request.output_tokens ? "recompute" : "prefill", tokens, 0, 0]);
    return tokens;
  }
  const drafts = request.request % 5 ? 0 : Math.floor(draw() * 3);
  request.output_tokens += 1 + drafts;
  request.done = request.prompt_tokens + request.output_tokens;
  rows.push([request.request, "decode", 1 + drafts, drafts, 1 + drafts]);
  return 1 + drafts;
}

function finished(requests, time) {
  const ended = [];
  for (const request of requests.values()) {
    if (request.output_tokens < request.max_tokens) continue;
    requests.delete(request.request);
    const { request: number, prompt_tokens, output_tokens } = request;
    ended.push({
      request: number,
      time,
      finish_reason: "length",
      prompt_tokens,
      cached_tokens: 0,
      output_tokens,
      num_preemptions: 0,
    });
  }
  return ended;
}
