/** The storage of chats with several pages of one browser: none overwrites what another has saved. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import vm from "node:vm";

const SCRIPT = readFileSync(new URL("../../../llmbackend/pages/static/chat.js", import.meta.url), "utf-8");

class Storage extends Map {
  getItem = (name) => this.get(name) ?? null;
  setItem = (name, text) => this.set(name, text);
  removeItem = (name) => this.delete(name);
}

/** A page's llmbackendChat on a storage that it shares with other pages. */
function open(localStorage) {
  const window = { addEventListener() {} };
  const document = { addEventListener() {}, querySelector: () => null };
  vm.runInNewContext(SCRIPT, { window, document, localStorage, requestAnimationFrame() {} });
  return window.llmbackendChat;
}

function chat(texts, timing = null) {
  return JSON.stringify({ title: "t", turns: texts.map((content) => ({ content, timing })) });
}

test("a page does not overwrite what another has saved since", () => {
  const storage = new Storage();
  const [one, other] = [open(storage), open(storage)];
  assert.equal(one.save("id", "t", chat(["a"])), "saved");
  assert.equal(other.load("id"), chat(["a"]));
  assert.equal(other.save("id", "t", chat(["a", "b"])), "saved");
  assert.equal(one.save("id", "t", chat(["a", "c"])), "changed");
  assert.equal(one.save("copy", "t", chat(["a", "c"])), "saved");
  assert.equal(other.save("id", "t", chat(["a", "b", "d"])), "saved");
  assert.equal(one.load("id"), chat(["a", "b", "d"]));
  assert.equal(one.save("id", "t", chat(["e"])), "saved");
});

test("the same answer in two pages makes no copy", () => {
  const storage = new Storage();
  const [one, other] = [open(storage), open(storage)];
  one.save("id", "t", chat(["a"]));
  other.load("id");
  assert.equal(one.save("id", "t", chat(["a", "b"], { tokens_per_s: 1 })), "saved");
  assert.equal(other.save("id", "t", chat(["a", "b"])), "saved");
  assert.equal(one.save("id", "t", chat(["a", "b", "c"])), "saved");
});

test("a chat that another page has removed is saved again", () => {
  const storage = new Storage();
  const [one, other] = [open(storage), open(storage)];
  one.save("id", "t", chat(["a"]));
  other.remove("id");
  assert.equal(one.save("id", "t", chat(["a", "b"])), "saved");
});

test("a full storage is told", () => {
  const storage = new Storage();
  storage.setItem = () => {
    throw new Error("QuotaExceededError");
  };
  assert.equal(open(storage).save("id", "t", chat(["a"])), "full");
});
