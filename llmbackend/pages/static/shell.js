// Browser side of every page: the theme and the API key in its storage, and links in model text.
// Independent of what a page shows. Key and theme are in localStorage; a change of the key fires the event 'llmbackend-key'.
"use strict";

window.llmbackend = (() => {
  const KEY = "llmbackend.api_key";
  const THEME = "llmbackend.theme";
  const THEMES = {
    auto: { dark: "auto", icon: "brightness_auto", next: "light" },
    light: { dark: false, icon: "light_mode", next: "dark" },
    dark: { dark: true, icon: "dark_mode", next: "auto" },
  };

  const theme = () => (localStorage.getItem(THEME) in THEMES ? localStorage.getItem(THEME) : "auto");

  function showTheme() {
    const { dark, icon } = THEMES[theme()];
    Quasar.Dark.set(dark);
    const button = document.querySelector(".theme-button");
    if (!button) return;
    button.querySelector(".q-icon").textContent = icon;
    button.setAttribute("aria-label", `Theme: ${theme()}`);
  }

  function nextTheme() {
    localStorage.setItem(THEME, THEMES[theme()].next);
    showTheme();
  }

  const key = () => localStorage.getItem(KEY) || "";

  function setKey(text) {
    if (text) localStorage.setItem(KEY, text);
    else localStorage.removeItem(KEY);
    window.dispatchEvent(new Event("llmbackend-key"));
  }

  function askForKey(why) {
    document.querySelector(".ask-for-key").dispatchEvent(new CustomEvent("ask", { detail: why || "" }));
  }

  // Must be first in tab order, which elements mounted by Vue cannot be.
  function addSkipLink() {
    const link = Object.assign(document.createElement("a"), { href: "#content", textContent: "Skip to content" });
    link.className = "skip-link";
    document.body.prepend(link);
  }

  // Vue mounts the header after this file has run.
  function whenMounted(callback) {
    if (document.querySelector(".theme-button") && window.Quasar) callback();
    else requestAnimationFrame(() => whenMounted(callback));
  }
  whenMounted(showTheme);
  whenMounted(addSkipLink);

  return { nextTheme, key, setKey, askForKey };
})();
