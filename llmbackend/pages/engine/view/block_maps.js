/** The latest `maxMaps` maps of one engine's KV blocks, for lookups by time. */

export class BlockMaps {
  #maps = [];

  constructor(maxMaps = 1200) {
    this.maxMaps = maxMaps;
  }

  /** map: as in the feed */
  push(map) {
    const last = this.#maps.at(-1);
    if (last && last.numBlocks === map.num_blocks && sameRuns(last.runs, map.runs)) return;
    this.#maps.push({ time: map.time, numBlocks: map.num_blocks, runs: map.runs, truncated: Boolean(map.truncated) });
    if (this.#maps.length > this.maxMaps) this.#maps.shift();
  }

  forget(horizon) {
    const kept = this.#maps.findIndex((map) => map.time >= horizon);
    if (kept > 0) this.#maps.splice(0, kept);
  }

  /** The last map at or before `time`, else the first map; null if there is none. */
  at(time) {
    for (let index = this.#maps.length - 1; index >= 0; index--) {
      if (this.#maps[index].time <= time) return this.#maps[index];
    }
    return this.#maps[0] ?? null;
  }
}

function sameRuns(runs, others) {
  return (
    runs.length === others.length && runs.every((run, at) => run.every((value, field) => value === others[at][field]))
  );
}

/** The run of blocks that contains `block`: {first, count, state, request, references}, or null. */
export function runOf(map, block) {
  const found = map?.runs.find(([first, count]) => first <= block && block < first + count);
  if (!found) return null;
  const [first, count, state, request, references] = found;
  return { first, count, state, request, references };
}

/** How many blocks are free, cached, used and shared (used by more than one request), and how many `request` holds. */
export function countBlocks(map, request = null) {
  const counts = { free: 0, cached: 0, used: 0, shared: 0, selected: 0 };
  for (const [, count, state, owner, references] of map?.runs ?? []) {
    counts[state] += count;
    if (references > 1) counts.shared += count;
    if (request !== null && owner === request) counts.selected += count;
  }
  return counts;
}
