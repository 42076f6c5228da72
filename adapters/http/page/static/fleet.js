// The replicas of a fleet: a list of all, one of which the rest of the live view shows.

import { call } from "./api.js";
import { $, el, keyed, number, percent, set } from "./dom.js";

const HEADER = "x-rekindle-replica"; // of every answer that came from a replica
const AGAIN_MS = 2000;
let chosen = null, shown = null, timer = null, changed = () => {};

/** The path of something that one replica shows: of the chosen one, where there are several. */
export const ofReplica = (path) => (chosen ? `${path}?replica=${encodeURIComponent(chosen)}` : path);

/** Looks at an answer of the server: if it came from a replica, the list of all is shown. */
export function heard(response, whenChosen) {
  shown = response.headers.get(HEADER);
  changed = whenChosen;
  if (shown) timer ??= setTimeout(list, 0);
}

/** The stream of the chosen replica has failed: any other one may be shown. */
export function forget() {
  chosen = null;
}

async function list() {
  try {
    draw((await (await call("fleet")).json()).data);
  } catch {
    // the ingress is away for a moment; the header of the page says so
  }
  timer = setTimeout(list, AGAIN_MS);
}

function draw(replicas) {
  $("fleet").hidden = false;
  const ready = replicas.filter((one) => one.state === "ready").length;
  $("fleet-note").textContent = `${ready} of ${replicas.length} ready; choose one to see its requests below`;
  keyed($("replicas"), replicas, (one) => one.id, make, update);
}

function make({ id }) {
  const choose = () => {
    chosen = id;
    changed();
  };
  const button = el("button", { type: "button", class: "quiet", onclick: choose, text: id });
  return el("tr", {}, el("th", { scope: "row" }, button), ["state", "busy", "queue", "prompt", "reused"].map((name) => el("td", { class: name })));
}

function update(row, one) {
  const { totals } = one;
  const cell = (name, text) => set(row.querySelector(`.${name}`), { text });
  set(row.querySelector("button"), { "aria-pressed": String(one.id === shown) });
  cell("state", one.state);
  cell("busy", totals ? `${one.slots_busy} of ${one.total_slots}` : "");
  cell("queue", totals ? number(one.queue) : "");
  cell("prompt", totals ? number(totals.prompt_tokens) : "");
  cell("reused", totals ? percent(Object.values(totals.restored).reduce((all, some) => all + some, 0), totals.prompt_tokens) : "");
}
