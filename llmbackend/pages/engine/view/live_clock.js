/**
 * The server's time, estimated from the times in events and their arrival.
 *
 * The server's clock may differ from the browser's. Each event bounds the difference, because it cannot arrive before it
 * happened; the tightest bound of the last seconds is used.
 */

const KEPT = 64;

export class LiveClock {
  #offsets = [];

  /** time: of an event, unix seconds of the server. arrival: seconds of the browser's clock */
  observe(time, arrival) {
    this.#offsets.push(time - arrival);
    if (this.#offsets.length > KEPT) this.#offsets.shift();
  }

  /** The server's time at `arrival`. */
  at(arrival) {
    return this.#offsets.length ? arrival + Math.max(...this.#offsets) : arrival;
  }
}
