// Converts the TeX of each `.math` element to MathML, which browsers display.
// Independent of Markdown. Uses NiceGUI's copy of KaTeX; without it, or if it rejects a formula, the TeX remains.
// Formulas cannot load or run anything: such commands are disabled, and macro expansions are limited.
import katex from "/_nicegui/katex.js";

const OPTIONS = { output: "mathml", strict: "ignore", trust: false, maxExpand: 500, maxSize: 20 };
const MAX_KEPT = 1000;

const kept = new Map(); // by TeX and mode: a growing answer is rendered many times

function mathml(tex, displayMode) {
  const key = `${displayMode}${tex}`;
  if (!kept.has(key)) {
    if (kept.size >= MAX_KEPT) kept.clear();
    kept.set(key, rendered(tex, displayMode));
  }
  return kept.get(key);
}

function rendered(tex, displayMode) {
  try {
    return katex.renderToString(tex, { ...OPTIONS, displayMode });
  } catch {
    return null;
  }
}

function renderAll() {
  for (const element of document.querySelectorAll(".prose .math:not(.math--done)")) {
    const html = mathml(element.textContent, element.classList.contains("math--display"));
    element.classList.add("math--done");
    if (html === null) element.classList.add("math--refused");
    else element.innerHTML = html;
  }
}

new MutationObserver(renderAll).observe(document.body, { childList: true, subtree: true });
renderAll();
