/** Sums of one engine's steps over intervals of 100 ms, for charts in which single steps are too narrow. */

export const BUCKET_S = 0.1;

const SUMMED = ["steps", "scheduleMs", "runMs", "commitMs", "prefillTokens", "decodeTokens", "outputTokens", "rows"];
const HIGHEST = ["maxRunning", "maxWaiting"];
const LATEST = ["blocksUsed", "blocksCached", "blocksFree"];
const FIELDS = [...SUMMED, ...HIGHEST, ...LATEST];
const NOTHING = Object.freeze(Object.fromEntries(FIELDS.map((field) => [field, 0])));

export class Buckets {
  /** seconds: how far back the intervals reach */
  constructor(seconds = 300) {
    this.size = Math.ceil(seconds / BUCKET_S) + 1;
    this.interval = new Float64Array(this.size).fill(-1);
    for (const field of FIELDS) this[field] = new Float32Array(this.size);
  }

  /** step: as in the feed */
  push(step) {
    const at = this.#cellFor(Math.floor(step.time / BUCKET_S));
    const parts = step.parts_ms ?? { schedule: 0, run: step.duration_ms, commit: 0 };
    this.steps[at] += 1;
    this.scheduleMs[at] += parts.schedule ?? 0;
    this.runMs[at] += parts.run ?? 0;
    this.commitMs[at] += parts.commit ?? 0;
    this.rows[at] += step.rows.length;
    for (const [, kind, tokens, , outputTokens] of step.rows) {
      this[kind === "decode" ? "decodeTokens" : "prefillTokens"][at] += tokens;
      this.outputTokens[at] += outputTokens;
    }
    this.maxRunning[at] = Math.max(this.maxRunning[at], step.num_running);
    this.maxWaiting[at] = Math.max(this.maxWaiting[at], step.num_waiting);
    this.#setBlocks(at, step.blocks);
  }

  #setBlocks(at, blocks) {
    if (!blocks) return;
    this.blocksUsed[at] = blocks.used;
    this.blocksCached[at] = blocks.cached;
    this.blocksFree[at] = blocks.free;
  }

  #cellFor(interval) {
    const at = interval % this.size;
    if (this.interval[at] !== interval) {
      this.interval[at] = interval;
      for (const field of FIELDS) this[field][at] = 0;
    }
    return at;
  }

  /** The cell of the interval that contains `time`, or -1 if no step was in it. */
  cellAt(time) {
    const interval = Math.floor(time / BUCKET_S);
    const at = interval % this.size;
    return this.interval[at] === interval ? at : -1;
  }

  /** Calls visit(start, cell) for each interval with steps in [from, to), in order of time. */
  each(from, to, visit) {
    const first = Math.max(Math.floor(from / BUCKET_S), Math.floor(to / BUCKET_S) - this.size + 1);
    for (let interval = first; interval * BUCKET_S < to; interval++) {
      const at = interval % this.size;
      if (this.interval[at] === interval) visit(interval * BUCKET_S, at);
    }
  }

  /** Over [from, to): sums {steps, prefillTokens, decodeTokens, …}, maxima of running and waiting, the last block counts. */
  total(from, to) {
    const sum = { ...NOTHING };
    this.each(from, to, (_, at) => {
      for (const field of SUMMED) sum[field] += this[field][at];
      for (const field of HIGHEST) sum[field] = Math.max(sum[field], this[field][at]);
      for (const field of LATEST) sum[field] = this[field][at];
    });
    return sum;
  }
}
