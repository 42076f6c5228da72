// What an answer tells about itself: where its prompt came from, why no more was reused, how long each state took.

import { duration, el, number, rate, set } from "./dom.js";
import { PLACES, STAGES, TIERS, missed, unproposed } from "./words.js";

/** Of a stream's last chunk that has them, and when its first token came. */
export function summary(chunk, firstMs) {
  const { rekindle, timings } = chunk, cache = rekindle.prefix_cache;
  return {
    prompt: timings.cache_n + timings.prompt_n,
    restored: timings.cache_n,
    tier: rekindle.tier,
    tokens: timings.predicted_n,
    speed: timings.predicted_per_second,
    step: rekindle.speculation.acceptance_length,
    unproposed: rekindle.speculation.why,
    firstMs,
    miss: cache.miss,
    stages: rekindle.stages_ms,
  };
}

export function figures(told) {
  const line = el("p", { class: "figures" });
  const say = (text, title) => line.append(el("span", { text, title }));
  if (told.restored) say(`${number(told.restored)} of ${number(told.prompt)} prompt tokens reused from ${TIERS[told.tier]}`, "These tokens were not computed again");
  else say(`${number(told.prompt)} prompt tokens, all of them computed`);
  if (told.firstMs !== null) say(`first token after ${duration(told.firstMs)}`);
  say(`${number(told.tokens)} tokens at ${rate(told.speed)} a second`);
  say(`${told.step.toFixed(2)} tokens per step`, told.unproposed ? `The draft stopped proposing: ${unproposed(told.unproposed)}` : "The mean number of tokens that a decode step gave");
  return el("div", { class: "told" }, line, stages(told.stages), told.miss ? why(told.miss) : null);
}

function stages(spent) {
  const whole = Object.values(spent).reduce((sum, ms) => sum + ms, 0);
  const known = STAGES.filter(([state]) => spent[state] > 0);
  const words = known.map(([state, name]) => `${name} ${duration(spent[state])}`).join(", ");
  const bar = el("div", { class: "bar thin", role: "img", "aria-label": words, title: words });
  for (const [state, name] of known) bar.append(set(el("span", { class: `s-${name}` }), { "--size": spent[state] / whole }));
  return bar;
}

function why(miss) {
  const said = el("details", { class: "why" }, el("summary", { text: "Why was no more reused?" }));
  said.append(...explained(miss));
  return said;
}

export const ALIKE = 16; // tokens that a prompt and a kept one begin with, or they have nothing to do with each other

/** Elements that say why no more of a prompt was there, with both texts where it goes on differently. */
export function explained(miss) {
  if (miss.diverged_at < ALIKE) return [el("p", { text: "This prompt begins differently from every prompt that is kept." })];
  const made = [el("p", { text: missed(miss.reason) })];
  if (miss.sent === undefined || miss.kept === undefined) return made;
  const where = miss.message === null ? "before the first message, which is mostly the list of tools" : `in message ${miss.message}${miss.role ? ` (${miss.role})` : ""}`;
  const kept = miss.kept_in === "recent" ? "no longer kept, only remembered" : (PLACES[miss.kept_in] ?? miss.kept_in);
  made.push(el("p", { class: "where", text: `The difference is ${where}. The other prompt is ${kept}.` }));
  const same = alike(miss.sent, miss.kept);
  made.push(
    el("dl", { class: "diff" }, el("dt", { text: "sent" }), el("dd", {}, parts(miss.sent, same)), el("dt", { text: "kept" }), el("dd", {}, parts(miss.kept, same))),
  );
  return made;
}

const parts = (text, same) => [text.slice(0, same), el("mark", { text: text.slice(same) || "(end of the prompt)" })];

function alike(one, other) {
  let n = 0;
  while (n < one.length && n < other.length && one[n] === other[n]) n++;
  return n;
}
