/** Layout of the lanes between two times: from tracks and steps to boxes in pixels, in order of time. */

export const MAX_LANES = 128;
/** From this width per step (pixels), every step has its own box. */
const MIN_STEP_PX = 4;

/** The tracks to draw, [{track, lane}], and how many were omitted because their lane is beyond MAX_LANES. */
export function visibleTracks(tracks, scale) {
  const shown = [];
  let numHidden = 0;
  let numLanes = 0;
  for (const track of tracks.between(scale.start, scale.end)) {
    if (track.lane >= MAX_LANES) {
      numHidden++;
      continue;
    }
    numLanes = Math.max(numLanes, track.lane + 1);
    shown.push(track);
  }
  return { shown, numLanes, numHidden };
}

/** Pixels per lane, by the number of lanes. */
export function laneHeight(numLanes) {
  if (numLanes <= 8) return 30;
  if (numLanes <= 20) return 22;
  return numLanes <= 40 ? 17 : 14;
}

/** Whether single steps are wide enough to be drawn. */
export function showsSteps(steps, scale) {
  const first = steps.firstEndingAfter(scale.start);
  const end = steps.firstEndingAfter(scale.end);
  if (end === first) return false;
  return ((steps.endOf(end - 1) - steps.startOf(first)) / (end - first)) * scale.perSecond >= MIN_STEP_PX;
}

/** Boxes {lane, kind, x, width, track, tokens, drafts, steps, reason} of runs of steps. */
export function segmentBoxes(shown, scale, kinds = null) {
  const boxes = [];
  for (const track of shown) {
    for (let at = firstSegment(track.segments, scale.start); at < track.segments.length; at++) {
      const segment = track.segments[at];
      if (segment.start >= scale.end) break;
      if (kinds && !kinds.has(segment.kind)) continue;
      boxes.push(box(track, segment.kind, segment.start, segment.end, scale, segment));
    }
  }
  return boxes;
}

/** The same, with a box for each single step. */
export function stepBoxes(shown, steps, scale) {
  const byRequest = new Map(shown.map((track) => [track.request, track]));
  const boxes = segmentBoxes(shown, scale, new Set(["waiting", "preempted", "recovering"]));
  for (
    let index = steps.firstEndingAfter(scale.start);
    index < steps.end && steps.startOf(index) < scale.end;
    index++
  ) {
    const ofStep = new Map();
    steps.eachRow(index, (request, kind, tokens, drafts) => {
      const track = byRequest.get(request);
      if (!track) return;
      const other = ofStep.get(request);
      if (other) return void Object.assign(other, { tokens: other.tokens + tokens, drafts: other.drafts + drafts });
      const shownKind = kind === "decode" && drafts > 0 ? "drafts" : kind;
      const made = box(track, shownKind, steps.startOf(index), steps.endOf(index), scale, {
        tokens,
        drafts,
        steps: 1,
        reason: "",
      });
      ofStep.set(request, made);
      boxes.push(made);
    });
  }
  return boxes;
}

/** The track and segment at a point of the lanes: {track, segment} or null. */
export function hit(shown, lane, time) {
  for (const track of shown) {
    if (track.lane !== lane || track.received > time || (track.ended && track.ended.time < time)) continue;
    const segment = track.segments.findLast((each) => each.start <= time && time <= each.end) ?? null;
    return { track, segment };
  }
  return null;
}

/** The request named by each lane's label: the one at the right edge, or else the last one before it. */
export function laneLabels(shown, end) {
  const labels = new Map();
  for (const track of shown) {
    const other = labels.get(track.lane);
    if (track.received <= end && (!other || track.received > other.received)) labels.set(track.lane, track);
  }
  return labels;
}

function firstSegment(segments, time) {
  let low = 0,
    high = segments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (segments[middle].end > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

function box(track, kind, start, end, scale, { tokens, drafts, steps, reason }) {
  const x = Math.max(scale.left, scale.x(start));
  const right = Math.min(scale.left + scale.width, end === Infinity ? scale.left + scale.width : scale.x(end));
  return { lane: track.lane, kind, x, width: Math.max(0, right - x), track, tokens, drafts, steps, reason };
}
