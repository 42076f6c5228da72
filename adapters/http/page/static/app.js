// Ties the page together: the stream of the server's status, the header, tabs, colours.

import { Failed, askKey, call, events } from "./api.js";
import * as chat from "./chat.js";
import { $, bytes, set } from "./dom.js";
import * as fleet from "./fleet.js";
import * as live from "./live.js";
import * as prompt from "./prompt.js";

const AGAIN_MS = [500, 1000, 2000, 5000]; // between attempts to reach a server that does not answer
const SMALL_BYTES = 256 * 2 ** 20; // of weights: a model with fewer, such as the demo, makes things up

chat.start();
prompt.start();
tabs();
theme();
views();
follow();

/** For as long as the page is open: follows the server's status, and comes back when the server does. */
async function follow() {
  for (let failures = 0; ; failures++) {
    const reading = new AbortController();
    try {
      const response = await call(fleet.ofReplica("events"), { signal: reading.signal });
      fleet.heard(response, () => reading.abort());
      const stream = events(response);
      failures = 0;
      live.forget();
      for await (const { event, data } of stream) if (event === "status") safely(() => shown(JSON.parse(data)));
      say("stopped", "Stopped");
    } catch (error) {
      if (reading.signal.aborted) {
        failures = -1; // another replica was chosen
        continue;
      }
      fleet.forget();
      if (error instanceof Failed && error.status === 401) {
        say("locked", "Locked");
        await unlocked();
        failures = -1;
        continue;
      }
      if (error instanceof Failed && error.status === 503) say("loading", "Loading");
      else if (error instanceof Failed) say("stopped", error.message);
      else say("stopped", "Not reachable");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]));
  }
}

/** A mistake in drawing is no lost connection. */
function safely(work) {
  try {
    work();
  } catch (error) {
    reportError(error);
  }
}

async function unlocked() {
  $("locked").hidden = false;
  do await new Promise((resolve) => ($("locked").onclick = resolve));
  while (!(await askKey("")));
}

function shown(changed) {
  live.heard(changed);
  if ("model_alias" in changed) {
    set($("model"), { text: changed.model_alias });
    document.title = `${changed.model_alias} · Rekindle`;
  }
  if ("model" in changed) {
    const size = changed.model?.size ?? SMALL_BYTES;
    set($("small"), { hidden: size >= SMALL_BYTES, text: `This model is a demonstration (${bytes(size)}). It makes things up: do not rely on its answers.` });
  }
  if ("state" in changed) say(changed.state, changed.state === "ready" ? "Ready" : "Shutting down");
  if ("troubles" in changed) {
    const told = Object.entries(changed.troubles).map(([whose, what]) => `${whose}: ${what}`);
    set($("troubles"), { text: told.join("\n"), hidden: told.length === 0 });
  }
}

/** Only what is new is said: it is read out. */
function say(state, text) {
  set($("state"), { text, "data-is": state });
}

function tabs() {
  const all = [$("tab-chat"), $("tab-prompt")];
  const choose = (chosen) => {
    for (const tab of all) {
      const selected = tab === chosen;
      set(tab, { "aria-selected": String(selected), tabindex: selected ? 0 : -1 });
      $(tab.getAttribute("aria-controls")).hidden = !selected;
    }
    $("new-chat").hidden = chosen !== all[0];
  };
  all.forEach((tab, n) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = all[(n + step + all.length) % all.length];
      choose(next);
      next.focus();
    });
  });
}

/** As the system, light, dark, and so on. */
function theme() {
  const order = ["auto", "light", "dark"], root = document.documentElement, button = $("theme");
  const show = () => {
    const now = root.dataset.theme ?? "auto";
    set(button, { "aria-label": `Colours: ${now === "auto" ? "as the system" : now}`, title: `Colours: ${now === "auto" ? "as the system" : now}`, "data-theme": now });
  };
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(root.dataset.theme ?? "auto") + 1) % order.length];
    if (next === "auto") {
      delete root.dataset.theme;
      localStorage.removeItem("rekindle.theme");
    } else {
      root.dataset.theme = next;
      localStorage.setItem("rekindle.theme", next);
    }
    show();
  });
  show();
}

/** On narrow screens one half at a time is seen: which one, links say. */
function views() {
  const links = [...document.querySelectorAll(".views a")];
  const show = (name) => {
    document.body.dataset.view = name;
    for (const link of links) set(link, { "aria-current": link.hash === `#${name}` ? "true" : null });
  };
  for (const link of links)
    link.addEventListener("click", (event) => {
      event.preventDefault();
      show(link.hash.slice(1));
      scrollTo(0, 0);
    });
  show("talk");
}
