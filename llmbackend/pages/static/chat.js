// What the chat page does in the browser alone: chats in localStorage, scrolling, copying, keys.
// Does not know: what a chat holds. A chat is one entry of the storage; the list of chats is another.
"use strict";

window.llmbackendChat = (() => {
  const INDEX = "llmbackend.chats";
  const CHAT = "llmbackend.chat.";
  const SETTINGS = "llmbackend.chat_settings";
  const NEAR_END_PIXELS = 80;

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

  function save(id, title, text) {
    const others = list().filter((entry) => entry.id !== id);
    return store(CHAT + id, text) && store(INDEX, JSON.stringify([{ id, title }, ...others]));
  }

  function remove(id) {
    localStorage.removeItem(CHAT + id);
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

  // navigator.clipboard exists on https and localhost alone.
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
      event.preventDefault(); // a link of a model must not replace this page, nor know it
      window.open(link.href, "_blank", "noopener,noreferrer");
    }
  });

  const composer = () => document.querySelector(".composer__field textarea");

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector(".q-dialog, .q-menu")) {
      document.querySelector(".composer__stop")?.click();
    } else if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      document.querySelector(".chats__new")?.click();
    }
  });

  // A viewer who reads the end of the thread goes on reading it; one who has scrolled up stays there.
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
    load: (id) => localStorage.getItem(CHAT + id),
    settings: () => localStorage.getItem(SETTINGS),
    saveSettings: (text) => store(SETTINGS, text),
    focusComposer: () => composer()?.focus(),
  };
})();
