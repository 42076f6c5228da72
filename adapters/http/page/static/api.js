// Talking to the server: the API key, requests, errors in words, and streams of events.

import { $ } from "./dom.js";

const KEY = "rekindle.key";
const IDLE_MS = 30_000; // a stream that is silent for so long is dead: the server says something every 5 s

/** What went wrong, as the server words it. */
export class Failed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** One question at a time, however many requests wait for the key. Resolves to false where nobody gives one. */
let asking = null;

export function askKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key"), text = $("key-text");
    const done = (given) => {
      $("key-form").onsubmit = $("key-cancel").onclick = dialog.oncancel = null;
      dialog.close();
      text.value = "";
      asking = null;
      $("locked").hidden = given;
      resolve(given);
    };
    $("key-why").textContent = why;
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, text.value.trim());
      done(true);
    };
    $("key-cancel").onclick = () => done(false);
    dialog.oncancel = (event) => {
      event.preventDefault();
      done(false);
    };
    dialog.showModal();
    text.focus();
  });
  return asking;
}

/** A response that is well; asks for the key where it is missing or refused. Raises Failed, or what fetch does. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY), headers = { accept: "application/json, text/event-stream" };
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const method = body === undefined ? "GET" : "POST";
    const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
    if (response.ok) return response;
    const told = await response.json().catch(() => null);
    const message = told?.error?.message ?? `The server answered ${response.status}.`;
    if (response.status !== 401) throw new Failed(response.status, message);
    // another request may have been given another key meanwhile: that one is tried first
    if (sessionStorage.getItem(KEY) !== key) continue;
    sessionStorage.removeItem(KEY);
    const why = key ? "The server refused this key. It is wrong, or no longer valid." : "Without a key the page stays empty.";
    if (!(await askKey(why))) throw new Failed(401, "No API key was given.");
  }
}

/** Events of a response, as {event, data}; a stream that falls silent raises. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await within(reader.read(), IDLE_MS);
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) found.event = line.slice(7);
          else if (line.startsWith("data: ")) found.data += line.slice(6);
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function within(promise, ms) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("The server sends nothing any more.")), ms);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** The chunks of a generation. Raises Failed for an error that comes in the middle. */
export async function* chunks(path, body, signal) {
  for await (const { data } of events(await call(path, { body, signal }))) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failed(500, chunk.error.message);
    yield chunk;
  }
}
