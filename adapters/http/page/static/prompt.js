// The prompt box: a text, and what the model goes on with, token by token as they come.

import { Failed, chunks } from "./api.js";
import { $, duration, el } from "./dom.js";
import { figures, summary } from "./figures.js";

const SURE = Math.log(0.9), DOUBT = Math.log(0.4);
let running = null;

export function start() {
  $("raw").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) goOn();
  });
  $("raw-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) {
      event.preventDefault();
      goOn();
    }
  });
  $("raw-stop").addEventListener("click", () => running?.abort());
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
}

async function goOn() {
  const out = $("raw-out"), told = $("raw-figures"), prompt = $("raw-text").value;
  if (!prompt) return;
  const body = { prompt, stream: true, stream_options: { include_usage: true }, logprobs: 0 };
  const most = $("raw-tokens").valueAsNumber;
  if (!Number.isNaN(most)) body.max_tokens = most;
  out.replaceChildren(el("span", { class: "given", text: prompt }));
  told.textContent = "";
  told.className = "figures";
  running = new AbortController();
  busy(true);
  const began = performance.now();
  let last = began, steps = 0, firstMs = null;
  try {
    for await (const chunk of chunks("v1/completions", body, running.signal)) {
      const choice = chunk.choices[0];
      if (choice?.text || choice?.logprobs) {
        const now = performance.now();
        firstMs ??= now - began;
        steps++;
        out.append(step(choice, steps, now - last));
        out.scrollTop = out.scrollHeight;
        last = now;
      }
      if (chunk.rekindle) told.replaceChildren(figures(summary(chunk, firstMs)));
    }
  } catch (error) {
    if (running.signal.aborted) told.textContent = "Stopped.";
    else {
      told.textContent = error instanceof Failed ? error.message : "The connection to the server was lost.";
      told.className = "figures error";
    }
  }
  running = null;
  busy(false);
}

/** What one decode step gave. A character whose bytes are in several tokens stands in one piece. */
function step(choice, number, ms) {
  const { tokens = [], token_logprobs: logprobs = [] } = choice.logprobs ?? {};
  const said = el("span", { class: "step", title: `step ${number}: ${tokens.length} token${tokens.length === 1 ? "" : "s"}, after ${duration(ms)}` });
  if (tokens.length === 0 || tokens.some((token) => token.startsWith("bytes:")) || tokens.join("") !== choice.text) {
    said.append(el("span", { class: "tok", text: choice.text }));
    return said;
  }
  tokens.forEach((token, n) => {
    const logprob = logprobs[n] ?? 0, how = logprob >= SURE ? "sure" : logprob < DOUBT ? "doubt" : "";
    said.append(el("span", { class: `tok ${how}`, text: token, title: `${JSON.stringify(token)}: ${(100 * Math.exp(logprob)).toFixed(1)} %, step ${number}` }));
  });
  return said;
}

function busy(yes) {
  const focused = document.activeElement;
  $("raw-go").hidden = yes;
  $("raw-stop").hidden = !yes;
  $("raw-out").setAttribute("aria-busy", String(yes));
  if (focused === $("raw-go") || focused === $("raw-stop") || focused === document.body) $(yes ? "raw-stop" : "raw-go").focus();
}
