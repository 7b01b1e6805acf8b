/** Parses server-sent events from the chunks of a stream. */

export class SseParser {
  #rest = "";
  #event = "";
  #data = [];
  #id = "";

  /** The events that `text` completes: a list of {event, data, id}, data parsed as JSON. */
  push(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "") this.#finish(events);
      else this.#field(line);
    }
    return events;
  }

  #field(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#event = value;
    else if (name === "data") this.#data.push(value);
    else if (name === "id") this.#id = value;
  }

  #finish(events) {
    if (this.#data.length > 0)
      events.push({ event: this.#event || "message", data: JSON.parse(this.#data.join("\n")), id: this.#id });
    this.#event = "";
    this.#data = [];
  }
}
