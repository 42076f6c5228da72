// The chat. Its conversation is kept in this browser, and the server keeps what it has read of it.

import { Failed, chunks } from "./api.js";
import { $, el } from "./dom.js";
import { figures, summary } from "./figures.js";
import { copied, rendered } from "./markdown.js";

const KEPT = "rekindle.chat", SETTINGS = "rekindle.settings";
const MOST_TURNS = 400; // that are kept; of the 5 MB that browsers give
const STARTERS = ["What is Rekindle?", "What is a KV cache?", "Write a function that reverses a string."];
const FIELDS = { system: "set-system", temperature: "set-temperature", tokens: "set-tokens", speculation: "set-speculation" };

let turns = [];
let running = null; // the AbortController of the answer that is being said

export function start() {
  turns = stored(KEPT, []);
  if (!Array.isArray(turns)) turns = [];
  for (const turn of turns) $("turns").append(drawn(turn));
  settle();
  restoreSettings();
  for (const text of STARTERS) $("starters").append(el("button", { type: "button", class: "quiet", text, onclick: () => say(text) }));
  const message = $("message");
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    say(message.value);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      say(message.value);
    }
  });
  message.addEventListener("input", () => fit(message));
  $("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
  });
  $("stop").addEventListener("click", stop);
  $("new-chat").addEventListener("click", () => {
    stop();
    turns = [];
    keep();
    $("turns").replaceChildren();
    settle();
    message.focus();
  });
  toEnd();
}

function say(text) {
  if (running || !text.trim()) return;
  $("message").value = "";
  fit($("message"));
  add({ role: "user", content: text });
  answer();
}

async function answer() {
  const turn = { role: "assistant", content: "", reasoning: "", figures: null };
  const body = request(), shown = drawn(turn, "true"), began = performance.now();
  let firstMs = null, due = false;
  $("turns").append(shown);
  running = new AbortController();
  busy(true);
  toEnd();
  const draw = () => {
    due = false;
    const near = isNearEnd();
    fill(shown, turn);
    if (near) toEnd();
  };
  try {
    for await (const chunk of chunks("v1/chat/completions", body, running.signal)) {
      const delta = chunk.choices[0]?.delta;
      turn.content += delta?.content ?? "";
      turn.reasoning += delta?.reasoning_content ?? "";
      if (firstMs === null && (delta?.content || delta?.reasoning_content)) firstMs = performance.now() - began;
      if (chunk.rekindle) turn.figures = summary(chunk, firstMs);
      if (!due) {
        due = true;
        setTimeout(draw, 40);
      }
    }
    $("heard").textContent = turn.content;
  } catch (error) {
    if (running.signal.aborted) turn.note = "Stopped.";
    else turn.error = error instanceof Failed ? error.message : "The connection to the server was lost.";
    $("heard").textContent = turn.note ?? "";
  }
  running = null;
  shown.removeAttribute("aria-busy");
  turns.push(turn);
  keep();
  draw();
  busy(false);
}

/** The conversation so far, as the API takes it. What failed is not part of it. */
function request() {
  const said = turns.filter((turn) => !turn.error && (turn.role === "user" || turn.content));
  const messages = said.map(({ role, content }) => ({ role, content }));
  const system = $("set-system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  const temperature = $("set-temperature").valueAsNumber, tokens = $("set-tokens").valueAsNumber;
  if (!Number.isNaN(temperature)) body.temperature = temperature;
  if (!Number.isNaN(tokens)) body.max_tokens = tokens;
  if (!$("set-speculation").checked) body.speculation = "off";
  return body;
}

function stop() {
  running?.abort();
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  if (yes) {
    $("heard").textContent = "Answering";
    if (document.activeElement === document.body) $("stop").focus();
  } else if (document.activeElement === document.body || document.activeElement === $("stop")) $("message").focus();
  settle();
}

function add(turn) {
  turns.push(turn);
  keep();
  $("turns").append(drawn(turn));
  settle();
  toEnd();
}

function drawn(turn, busy = null) {
  const user = turn.role === "user";
  const shown = el("li", { class: `turn ${turn.role}`, "aria-busy": busy }, el("p", { class: "who", text: user ? "You" : "Model" }), el("div", { class: "said" }));
  fill(shown, turn);
  return shown;
}

function fill(shown, turn) {
  const said = shown.querySelector(".said");
  if (turn.role === "user") {
    said.textContent = turn.content;
    return;
  }
  const parts = [];
  if (turn.reasoning) parts.push(el("details", { class: "reasoning", open: !turn.content }, el("summary", { text: "Reasoning" }), el("div", {}, rendered(turn.reasoning))));
  parts.push(...rendered(turn.content));
  if (!parts.length && shown.hasAttribute("aria-busy")) parts.push(el("p", { class: "thinking" }, el("span", { class: "hidden", text: "Waiting for the first token" })));
  if (turn.note) parts.push(el("p", { class: "note", text: turn.note }));
  if (turn.error) parts.push(el("p", { class: "error", role: "alert", text: turn.error }));
  if (turn.figures) parts.push(figures(turn.figures));
  if (!shown.hasAttribute("aria-busy")) parts.push(tools(shown, turn));
  said.replaceChildren(...parts);
}

function tools(shown, turn) {
  const copy = el("button", { type: "button", class: "quiet", text: "Copy", "aria-label": "Copy this answer" });
  copy.addEventListener("click", () => copied(copy, turn.content));
  const again = el("button", { type: "button", class: "quiet again", text: "Try again" });
  again.addEventListener("click", () => {
    if (running) return;
    const at = turns.indexOf(turn);
    turns.length = at;
    while ($("turns").children.length > at) $("turns").lastElementChild.remove();
    $("message").focus();
    answer();
  });
  return el("p", { class: "tools" }, turn.content ? copy : null, again);
}

/** What depends on whether anything was said. */
function settle() {
  $("empty").hidden = turns.length > 0 || running !== null;
  $("new-chat").disabled = turns.length === 0;
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
}

const isNearEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
const toEnd = () => ($("log").scrollTop = $("log").scrollHeight);

function keep() {
  turns.splice(0, Math.max(0, turns.length - MOST_TURNS));
  try {
    localStorage.setItem(KEPT, JSON.stringify(turns));
  } catch {
    $("heard").textContent = "This browser has no room to keep the conversation.";
  }
}

function stored(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function restoreSettings() {
  const kept = stored(SETTINGS, {});
  for (const [name, id] of Object.entries(FIELDS)) {
    const field = $(id), property = field.type === "checkbox" ? "checked" : "value";
    if (name in kept) field[property] = kept[name];
    field.addEventListener("change", () => {
      kept[name] = field[property];
      localStorage.setItem(SETTINGS, JSON.stringify(kept));
    });
  }
}
