/** Reads /v2/engine/events until it is closed, and reconnects when the connection is lost. */

import { SseParser } from "./sse.js";

const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 5000;

export class FeedClient {
  #abort = new AbortController();
  #retryMs = FIRST_RETRY_MS;

  /**
   * url: of the feed, with its query
   * headers: function that returns the request's headers (the key may have changed between two attempts)
   * onEvent(event, data, id): each event
   * onState(state, text): "connecting", "open", "refused" (no further attempt) or "lost". text: what the server said
   */
  constructor(url, { headers, onEvent, onState }) {
    Object.assign(this, { url, headers, onEvent, onState });
    this.#run();
  }

  close() {
    this.#abort.abort();
  }

  async #run() {
    const signal = this.#abort.signal;
    while (!signal.aborted) {
      this.onState("connecting", "");
      const [state, text] = await this.#readOnce(signal).catch(() => ["lost", ""]);
      if (signal.aborted) return;
      this.onState(state, text);
      if (state === "refused") return;
      await pause(this.#retryMs, signal);
      this.#retryMs = Math.min(MAX_RETRY_MS, this.#retryMs * 2);
    }
  }

  /** Returns the state in which the connection has ended, and the server's reason; throws if it was lost. */
  async #readOnce(signal) {
    const answer = await fetch(this.url, { headers: this.headers(), signal, cache: "no-store" });
    const isRefused = answer.status >= 400 && answer.status < 500 && answer.status !== 429;
    if (!answer.ok) return [isRefused ? "refused" : "lost", await refusalText(answer)];
    this.onState("open", "");
    this.#retryMs = FIRST_RETRY_MS;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new SseParser();
    for (;;) {
      const { value, done } = await reader.read();
      if (done || signal.aborted) return ["lost", ""];
      for (const { event, data, id } of parser.push(value)) this.onEvent(event, data, id);
    }
  }
}

/** The text of an error response, on one line. */
export async function refusalText(answer) {
  const body = await answer.text().catch(() => "");
  let reason = body;
  try {
    const error = JSON.parse(body).error;
    reason = typeof error === "string" ? error : error.message;
  } catch {
    // Not every error is JSON.
  }
  return `${answer.status}: ${String(reason || answer.statusText).slice(0, 300)}`;
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        resolve();
      },
      { once: true },
    );
  });
}
