/** The Engine page as a Vue template. Its data and methods are in engine_view.js. */

const BAR = `
  <div class="engine__bar">
    <select aria-label="Engine" :value="status?.engine?.key" :disabled="!status?.engines?.length"
        @change="choose($event.target.value)">
      <option v-for="each in status?.engines ?? []" :key="each.key" :value="each.key">
        {{ each.model }} · version {{ each.version }} · {{ each.instance }}
      </option>
      <option v-if="!status?.engines?.length" value="">no engine</option>
    </select>
    <span v-if="status?.engine" class="engine__state" :class="'engine__state--' + status.engine.state">
      {{ stateText }}
    </span>
    <span class="engine__space"></span>
    <button type="button" class="engine__button" :aria-pressed="String(status?.paused ?? false)" title="Space"
        data-testid="pause" @click="pause">
      {{ status?.paused ? "▶ Live" : "❚❚ Pause" }}
    </button>
    <select aria-label="Time shown" title="+ and -" :value="status?.widthS" @change="zoomTo($event.target.value)">
      <option v-for="each in widths" :key="each" :value="each">
        {{ each < 60 ? each + " s" : each / 60 + " min" }}
      </option>
    </select>
    <button v-if="status?.engine?.limits" type="button" class="engine__button" :disabled="sending" data-testid="demo"
        @click="sendDemo">
      {{ sending ? "Sending…" : "Send 16 requests" }}
    </button>
    <button v-if="mayKill" type="button" class="engine__button engine__button--danger" data-testid="kill"
        @click="$refs.confirmKill.showModal()">
      Kill engine
    </button>
  </div>`;

const NOTICES = `
  <p v-if="refused" class="engine__notice engine__notice--bad" role="alert">
    The server refuses access to its engine events ({{ refused }}).
    <button v-if="needsKey" type="button" class="engine__button" @click="askForKey">Enter a key</button>
  </p>
  <p v-else-if="lost" class="engine__notice" role="status">
    {{ lostText }}
  </p>
  <p v-for="each in status?.models ?? []" :key="each.model + '/' + each.version" class="engine__notice"
    role="status">
    {{ each.model }} version {{ each.version }}: {{ each.state.toLowerCase() }} {{ loadText(each) }} {{ each.reason }}
  </p>
  <p v-if="message" class="engine__notice engine__notice--bad" role="alert">
    {{ message }} <button type="button" class="engine__button" @click="message = ''">Close</button>
  </p>`;

const FIGURES = `
  <dl class="engine__figures">
    <div v-for="each in status?.figures ?? []" :key="each.name" :title="each.title">
      <dd>{{ each.value }}</dd>
      <dt>{{ each.name }}</dt>
    </div>
  </dl>`;

const TIME = `
  <div class="engine__time">
    <div class="engine__overview-row">
      <canvas ref="overview" class="engine__overview" tabindex="0" role="slider"
        aria-label="Time shown, within the last five minutes" aria-valuemin="-300" aria-valuemax="0"
        :aria-valuenow="-Math.round(status?.behindS ?? 0)" :aria-valuetext="behind || 'live'"
        @pointerdown="overviewPoint" @pointermove="overviewPoint"></canvas>
      <span class="engine__clock" data-testid="clock">
        <b>{{ timeText }}</b> {{ status?.time }} <small>{{ behind }}</small>
      </span>
    </div>
    <canvas ref="charts" class="engine__charts" role="img"
      aria-label="Step time, tokens, batch, queue and KV blocks over time; the figures above give the current values"
      @pointermove="chartsMove" @pointerleave="leave"></canvas>
    <div class="engine__lanes-box">
      <canvas ref="lanes" class="engine__lanes" role="img"
        aria-label="One lane per request over time; the table below has the same data"
        @pointerdown="lanesDown" @pointermove="lanesMove" @pointerup="lanesUp" @pointercancel="drag = null"
        @pointerleave="leave" @wheel="wheel"></canvas>
      <canvas ref="labels" class="engine__labels" aria-hidden="true"></canvas>
      <div v-if="empty" class="engine__empty" data-testid="empty">
        <p>{{ emptyText }}</p>
        <p v-if="!status.numLive && status.scope === 'own'">Only requests of your own key are shown.</p>
      </div>
    </div>
    <p v-if="status?.numHidden" class="engine__more">
      {{ status.numHidden }} more requests do not fit in the lanes; the table lists more of them.
    </p>
    <ul class="engine__legend" aria-label="Marks">
      <li><i class="engine__mark engine__mark--prefill"></i>prefill chunk (P, tokens)</li>
      <li><i class="engine__mark engine__mark--decode"></i>decode</li>
      <li><i class="engine__mark engine__mark--drafts"></i>decode, drafts accepted (+n)</li>
      <li><i class="engine__mark engine__mark--recompute"></i>recompute (R)</li>
      <li><i class="engine__mark engine__mark--preempted"></i>preempted (X)</li>
      <li><i class="engine__mark engine__mark--waiting"></i>waiting (reason)</li>
      <li><i class="engine__mark engine__mark--recovering"></i>engine recovering (E)</li>
    </ul>
  </div>`;

const BLOCKS = `
  <details class="engine__panel" :open="blocksOpen" @toggle="toggleBlocks">
    <summary>KV blocks</summary>
    <canvas ref="blocks" class="engine__blocks" role="img"
      aria-label="The map of KV blocks; the figures below count them by state"
      @pointermove="blocksMove" @pointerleave="leave" @click="blocksClick"></canvas>
    <p v-if="!status?.blocks" class="engine__muted">No block map yet.</p>
    <ul v-else class="engine__legend engine__legend--blocks" data-testid="blocks">
      <li><i class="engine__cell engine__cell--used"></i>{{ status.blocks.used }} used</li>
      <li><i class="engine__cell engine__cell--shared"></i>{{ status.blocks.shared }} shared</li>
      <li><i class="engine__cell engine__cell--cached"></i>{{ status.blocks.cached }} cached</li>
      <li><i class="engine__cell engine__cell--free"></i>{{ status.blocks.free }} free</li>
      <li v-if="status.selected">
        <i class="engine__cell engine__cell--selected"></i>{{ status.blocks.selected }} of #{{ status.selected.request }}
      </li>
    </ul>
    <p v-if="status?.blocks?.truncated" class="engine__muted">The server sent only a part of the map.</p>
  </details>`;

const SELECTED = `
  <div v-if="status?.selected" class="engine__panel" data-testid="selected">
    <h2>Request #{{ status.selected.request }}</h2>
    <table class="engine__details">
      <tbody>
        <tr v-for="[name, value] in status.selected.rows" :key="name"><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
      </tbody>
    </table>
    <button v-if="status.selected.live" type="button" class="engine__button" @click="cancel(status.selected.request)">
      Cancel request
    </button>
  </div>`;

const HELP = `
  <div class="engine__panel engine__help">
    <h2>Keys</h2>
    <p>
      <kbd>Space</kbd> pause · <kbd>←</kbd> <kbd>→</kbd> scrub, with <kbd>Shift</kbd> farther · <kbd>Home</kbd> oldest ·
      <kbd>End</kbd> live · <kbd>+</kbd> <kbd>-</kbd> zoom · <kbd>Esc</kbd> clear selection.
      Click a lane to show its request and blocks.
    </p>
    <p v-if="status?.droppedEvents">
      {{ status.droppedEvents }} events were dropped because this browser read too slowly.
    </p>
  </div>`;

const TABLE = `
  <details class="engine__panel engine__table" data-testid="table" @toggle="toggleTable">
    <summary>Requests as a table</summary>
    <table v-if="tableOpen">
      <thead>
        <tr><th v-for="name in columns" :key="name" scope="col">{{ name }}</th></tr>
      </thead>
      <tbody>
        <tr v-for="row in status?.table ?? []" :key="row[0]"><td v-for="(cell, at) in row" :key="at">{{ cell }}</td></tr>
      </tbody>
    </table>
    <p v-if="tableOpen && !status?.table?.length">No requests.</p>
  </details>`;

const REST = `
  <p class="engine__hidden" role="status" aria-live="polite">{{ announcement }}</p>
  <div v-if="tip" class="engine__tip" :style="tip.style"><div v-for="line in tip.lines" :key="line">{{ line }}</div></div>
  <dialog ref="confirmKill" class="engine__dialog" aria-labelledby="kill-title">
    <h2 id="kill-title">Kill this engine?</h2>
    <p>
      The process of {{ status?.engine?.instance }} (pid {{ status?.engine?.pid }}) gets SIGKILL. The server starts a new
      one, which continues the requests.
    </p>
    <div class="engine__dialog-buttons">
      <button type="button" class="engine__button" @click="$refs.confirmKill.close()">Cancel</button>
      <button type="button" class="engine__button engine__button--danger" data-testid="confirm-kill" @click="kill">
        Kill it
      </button>
    </div>
  </dialog>`;

export const TEMPLATE = `
<section class="engine" aria-label="Live view of engines" tabindex="-1">
  ${BAR} ${NOTICES} ${FIGURES}
  <div class="engine__columns">
    ${TIME}
    <aside class="engine__side" aria-label="Memory and requests">${BLOCKS} ${SELECTED} ${HELP}</aside>
  </div>
  ${TABLE} ${REST}
</section>
`;
