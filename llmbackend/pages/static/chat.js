// Browser side of the chat page: chats in localStorage, scrolling, copying, keyboard shortcuts.
// Independent of the content of chats. Each chat is one entry in the storage; the list of chats is another.
"use strict";

window.llmbackendChat = (() => {
  const INDEX = "llmbackend.chats";
  const CHAT = "llmbackend.chat.";
  const ANSWER = "llmbackend.answer."; // prefix of the entry of an answer in progress
  const SETTINGS = "llmbackend.chat_settings";
  const NEAR_END_PIXELS = 80;
  const known = new Map(); // id of a chat: its text as this page loaded or saved it
  const MAX_FILE_BYTES = 3 << 20; // fits in one message to the page process

  function list() {
    try {
      const entries = JSON.parse(localStorage.getItem(INDEX) || "[]");
      return Array.isArray(entries) ? entries : [];
    } catch {
      return [];
    }
  }

  function store(name, text) {
    try {
      localStorage.setItem(name, text);
      return true;
    } catch {
      return false; // the storage is full
    }
  }

  function load(id) {
    const text = localStorage.getItem(CHAT + id);
    known.set(id, text);
    return text;
  }

  /** Whether two stored texts are the same chat. Pages that show the same answer measure different times. */
  function isSame(one, other) {
    const untimed = (name, value) => (name === "timing" || name === "recovery_ms" ? undefined : value);
    const chat = (text) => JSON.stringify(JSON.parse(text ?? null), untimed);
    return one === other || chat(one) === chat(other);
  }

  /** Returns "saved", "full", or "changed" if another page has changed the chat since this one loaded or saved it. */
  function save(id, title, text) {
    const stored = localStorage.getItem(CHAT + id);
    if (stored !== null && !isSame(stored, known.get(id)) && !isSame(stored, text)) return "changed";
    const others = list().filter((entry) => entry.id !== id);
    if (!store(CHAT + id, text)) return "full";
    known.set(id, text);
    return store(INDEX, JSON.stringify([{ id, title }, ...others])) ? "saved" : "full";
  }

  function remove(id) {
    localStorage.removeItem(CHAT + id);
    localStorage.removeItem(ANSWER + id);
    store(INDEX, JSON.stringify(list().filter((entry) => entry.id !== id)));
  }

  function exportChat(id) {
    const text = localStorage.getItem(CHAT + id);
    if (text === null) return;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(JSON.parse(text), null, 2)], { type: "application/json" }));
    link.download = `chat-${id}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function textOf(id) {
    try {
      const chat = JSON.parse(localStorage.getItem(CHAT + id));
      return [chat.title, ...chat.turns.map((turn) => turn.content || "")].join("\n").toLowerCase();
    } catch {
      return "";
    }
  }

  const search = (text) =>
    list()
      .map((entry) => entry.id)
      .filter((id) => textOf(id).includes(text.toLowerCase()));

  function pickFile(done) {
    const input = Object.assign(document.createElement("input"), { type: "file", accept: ".json,application/json" });
    input.onchange = async () => {
      const [file] = input.files;
      done(file.size <= MAX_FILE_BYTES ? await file.text() : "");
    };
    input.click();
  }

  // navigator.clipboard exists only on https and localhost.
  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }

  async function copyFrom(button, text, done) {
    await copy(text);
    const before = button.textContent;
    if (before === done) return; // still shown for the last click
    button.textContent = done;
    setTimeout(() => (button.textContent = before), 1200);
  }

  document.addEventListener("click", (event) => {
    const code = event.target.closest?.(".code__copy");
    if (code) return copyFrom(code, code.closest(".code").querySelector("code").textContent, "Copied");
    const button = event.target.closest?.(".copy-button");
    if (button) return copyFrom(button.querySelector(".q-icon"), button.dataset.copy, "check");
    const link = event.target.closest?.(".prose a[href]");
    if (link) {
      event.preventDefault(); // a link in a model's text must not replace this page or see its address
      window.open(link.href, "_blank", "noopener,noreferrer");
    }
  });

  // The button that closes the settings, if they are open.
  const openPanel = () => {
    const panel = document.querySelector(".q-drawer--right:not(.q-layout--prevent-focus)");
    return panel?.querySelector(".settings__close");
  };

  const composer = () => document.querySelector(".composer__field textarea");

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector(".q-dialog, .q-menu")) {
      (openPanel() || document.querySelector(".composer__stop"))?.click();
    } else if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      document.querySelector(".chats__new")?.click();
    }
  });

  // Scrolls with the end of the thread while it is visible; a viewer who has scrolled up stays there.
  let follows = true;
  const isNearEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - NEAR_END_PIXELS;
  const toEnd = () => {
    follows = true;
    window.scrollTo({ top: document.documentElement.scrollHeight });
  };
  window.addEventListener("scroll", () => (follows = isNearEnd()), { passive: true });
  function watchThread() {
    const thread = document.querySelector(".thread");
    if (!thread) return requestAnimationFrame(watchThread);
    new ResizeObserver(() => follows && toEnd()).observe(thread);
  }
  watchThread();

  return {
    list,
    save,
    remove,
    exportChat,
    toEnd,
    search,
    pickFile,
    load,
    answer: (id) => localStorage.getItem(ANSWER + id),
    saveAnswer: (id, text) => localStorage.getItem(CHAT + id) !== null && store(ANSWER + id, text),
    forgetAnswer: (id) => localStorage.removeItem(ANSWER + id),
    settings: () => localStorage.getItem(SETTINGS),
    saveSettings: (text) => store(SETTINGS, text),
    focusComposer: () => composer()?.focus(),
  };
})();
