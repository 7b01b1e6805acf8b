/** The latest steps of one engine with their rows, in typed arrays of fixed size. */

export const KINDS = ["prefill", "decode", "recompute"];

export class StepRing {
  /** maxSteps, maxRows: sizes, each a power of two */
  constructor(maxSteps = 1 << 17, maxRows = 1 << 21) {
    this.maxSteps = maxSteps;
    this.maxRows = maxRows;
    this.first = 0; // number of the oldest retained step, counted from the first step ever pushed
    this.end = 0; // number after the newest step
    this.#rowEnd = 0;
    this.start = new Float64Array(maxSteps); // unix seconds
    this.durationMs = new Float32Array(maxSteps);
    this.scheduleMs = new Float32Array(maxSteps);
    this.runMs = new Float32Array(maxSteps);
    this.commitMs = new Float32Array(maxSteps);
    this.number = new Float64Array(maxSteps); // as the engine counts
    this.rowFirst = new Float64Array(maxSteps);
    this.rowCount = new Uint32Array(maxSteps);
    this.rowRequest = new Float64Array(maxRows);
    this.rowKind = new Uint8Array(maxRows);
    this.rowTokens = new Uint32Array(maxRows);
    this.rowDrafts = new Uint16Array(maxRows);
  }

  #rowEnd;

  /** step: as in the feed. Steps arrive in order of time. */
  push(step) {
    const rows = step.rows.length > this.maxRows ? step.rows.slice(0, this.maxRows) : step.rows;
    while (this.end - this.first >= this.maxSteps || this.#rowsKept() + rows.length > this.maxRows) this.first++;
    const at = this.end % this.maxSteps;
    this.start[at] = step.time;
    this.durationMs[at] = step.duration_ms;
    this.scheduleMs[at] = step.parts_ms?.schedule ?? 0;
    this.runMs[at] = step.parts_ms?.run ?? 0;
    this.commitMs[at] = step.parts_ms?.commit ?? 0;
    this.number[at] = step.step;
    this.rowFirst[at] = this.#rowEnd;
    this.rowCount[at] = rows.length;
    for (const row of rows) this.#pushRow(row);
    this.end++;
  }

  #rowsKept() {
    return this.first === this.end ? 0 : this.#rowEnd - this.rowFirst[this.first % this.maxSteps];
  }

  #pushRow([request, kind, tokens, drafts]) {
    const at = this.#rowEnd++ % this.maxRows;
    this.rowRequest[at] = request;
    this.rowKind[at] = Math.max(0, KINDS.indexOf(kind));
    this.rowTokens[at] = tokens;
    this.rowDrafts[at] = drafts;
  }

  /** The number of the first retained step that ends after `time`; `end` if there is none. */
  firstEndingAfter(time) {
    let low = this.first,
      high = this.end;
    while (low < high) {
      const middle = Math.floor((low + high) / 2);
      if (this.endOf(middle) > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  startOf(index) {
    return this.start[index % this.maxSteps];
  }

  endOf(index) {
    const at = index % this.maxSteps;
    return this.start[at] + this.durationMs[at] / 1000;
  }

  /** Calls visit(request, kind, tokens, drafts) for each row of a step; a request with several choices has several. */
  eachRow(index, visit) {
    const at = index % this.maxSteps;
    for (let row = this.rowFirst[at], end = row + this.rowCount[at]; row < end; row++) {
      const cell = row % this.maxRows;
      visit(this.rowRequest[cell], KINDS[this.rowKind[cell]], this.rowTokens[cell], this.rowDrafts[cell]);
    }
  }

  /** The step in progress at `time` with the row of `request`, or null. */
  rowAt(request, time) {
    const index = this.firstEndingAfter(time);
    if (index >= this.end || this.startOf(index) > time) return null;
    let found = null;
    this.eachRow(index, (other, kind, tokens, drafts) => {
      if (other !== request) return;
      found ??= { step: this.number[index % this.maxSteps], kind, tokens: 0, drafts: 0 };
      found.tokens += tokens;
      found.drafts += drafts;
    });
    return (
      found && {
        ...found,
        rows: this.rowCount[index % this.maxSteps],
        durationMs: this.durationMs[index % this.maxSteps],
      }
    );
  }
}
