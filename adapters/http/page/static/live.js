// The live half: what the server's status says, drawn anew as parts of it change.

import { call } from "./api.js";
import { $, bytes, duration, el, keyed, number, percent, rate, set, spark, stacked } from "./dom.js";
import { ALIKE, explained } from "./figures.js";
import { ofReplica } from "./fleet.js";
import { ASIDE, FINISHES, STAGES, TIERS, missed, unproposed } from "./words.js";

const MOST_ROWS = 14; // of requests; the status has more
const MOST_MISSES = 4;
const SAMPLES = 60, SAMPLE_MS = 500; // of the rate: half a minute
const FEWEST_SAMPLES = 8; // fewer make no curve
const sum = (counts) => Object.values(counts).reduce((all, one) => all + one, 0);

let status = {};
let samples = [], counted = [], timer = null;

/** Some parts are new. */
export function heard(changed) {
  const first = !("state" in status);
  status = { ...status, ...changed };
  const has = (...names) => first || names.some((name) => name in changed);
  counted.push({ at: performance.now(), tokens: status.totals.completion_tokens });
  if (has("totals", "running", "queue", "slots_busy")) tiles();
  if (has("running", "recent", "queue", "slots_busy")) requests();
  if (has("full_cache", "totals")) cache();
  if (has("totals")) misses();
  if (has("totals", "runtime", "recent")) speculation();
  if (has("memory", "runtime")) memory();
  if (has("slots")) slots();
  timer ??= setInterval(sample, SAMPLE_MS);
}

/** The server is another one, or has begun anew. */
export function forget() {
  status = {};
  samples = [];
  counted = [];
}

// -- throughput and the other tiles

function sample() {
  const now = performance.now();
  while (counted.length > 1 && counted[1].at < now - 1000) counted.shift();
  const [from, to] = [counted[0], counted.at(-1)];
  const over = Math.max(SAMPLE_MS, now - from.at);
  samples.push(to === from ? 0 : (1000 * Math.max(0, to.tokens - from.tokens)) / over);
  if (counted.length === 1) counted[0].at = now;
  samples = samples.slice(-SAMPLES);
  tiles();
  if (samples.every((one) => one === 0) && !status.running.length) {
    clearInterval(timer);
    timer = null;
  }
}

function tiles() {
  const { totals, slots_busy: busy, queue, total_slots: seats } = status;
  const restored = sum(totals.restored);
  const rows = [
    throughput(busy),
    ["slots busy", `${busy} of ${seats}`, queue ? `${number(queue)} waiting for a slot` : "no request is waiting"],
    ["of prompt tokens reused", percent(restored, totals.prompt_tokens), `${number(restored)} of ${number(totals.prompt_tokens)} tokens`],
    ["tokens per decode step", totals.decode_steps ? (answered() / totals.decode_steps).toFixed(2) : "–", totals.proposed ? `${percent(totals.accepted, totals.proposed)} of proposals right` : "no proposals yet"],
  ];
  keyed(
    $("tiles"),
    rows.map((row, n) => [n, ...row]),
    ([n]) => n,
    () => el("div", { class: "tile" }, el("dt"), el("dd", {}, el("b"), el("span", { class: "more" }))),
    (tile, [, name, value, more]) => {
      set(tile.querySelector("dt"), { text: name });
      set(tile.querySelector("b"), { text: value });
      tile.querySelector(".more").replaceChildren(more);
    },
  );
}

/** The rate of answers; while no answer has tokens yet, what the busy slots do instead. */
function throughput(busy) {
  const now = samples.at(-1) ?? 0, curve = samples.length < FEWEST_SAMPLES ? "" : spark(samples, SAMPLES, "Tokens a second in the last half minute");
  if (!busy || now >= 0.05) return ["tokens a second", rate(now), curve];
  const answering = status.running.some((one) => one.stage === "Speculating");
  return ["no new tokens in the last second", answering ? "answering" : "reading prompts", curve];
}

/** Tokens of answers that are complete: their steps are counted. */
const answered = () => status.totals.completion_tokens - status.running.filter((one) => one.stage === "Speculating").reduce((all, one) => all + one.completion_tokens, 0);

// -- requests

function requests() {
  const { running, recent } = status, ended = new Map(recent.map((one) => [one.id, one]));
  const live = new Set(running.map((one) => one.id));
  const rows = [...running.map((one) => ({ ...one, past: ended.get(one.id) })), ...recent.filter((one) => !live.has(one.id)).map((past) => ({ id: past.id, stages_ms: past.stages_ms, past }))];
  const shown = rows.slice(0, Math.max(MOST_ROWS, running.length));
  const { slots_busy: busy, queue } = status;
  const count = busy + queue ? `${number(busy)} running${queue ? `, ${number(queue)} waiting` : ""}` : shown.length ? "none running; these are the last ones" : "none yet";
  $("requests-note").textContent = shown.length ? `${count}; times in ms` : count;
  if (!$("requests-head").children.length) {
    const cells = [["#", "request"], ...STAGES.map(([, name, does]) => [name, does]), ["prompt", "tokens of the prompt, and the share that was reused"], ["answer", "tokens generated, and how many a second"]];
    $("requests-head").append(el("tr", {}, cells.map(([name, title]) => el("th", { scope: "col", title, text: name }))));
  }
  const heads = $("requests-head").rows[0].cells;
  STAGES.forEach(([state], n) => (heads[n + 1].hidden = !isUsed(shown, state)));
  keyed($("requests"), shown, (one) => one.id, makeRow, (row, one) => updateRow(row, one, shown));
}

/** Whether any of the requests has been in this state: its column is hidden otherwise. */
const isUsed = (shown, state) => shown.some((one) => one.stage === state || one.stages_ms[state] !== undefined);

function makeRow({ id }) {
  const cells = STAGES.map(([, name]) => el("td", { class: `stage s-${name}`, "data-name": name }));
  return el("tr", {}, el("th", { scope: "row", text: id }), cells, el("td", { class: "of-prompt" }, el("span"), el("span", { class: "share" })), el("td", { class: "of-answer" }, el("small"), el("span")));
}

function updateRow(row, one, shown) {
  const past = one.past, spent = one.stages_ms, whole = Math.max(sum(spent), 1);
  row.className = one.stage ? "on" : "past";
  const aside = one.stage && one.stage in ASIDE ? one.stage.toLowerCase() : past && !["stop", "length"].includes(past.finish) ? FINISHES[past.finish] ?? past.finish : "";
  STAGES.forEach(([state, , does], n) => {
    const cell = row.cells[n + 1], ms = spent[state], now = one.stage === state;
    set(cell, { text: ms === undefined ? "" : short(ms), "--share": ms === undefined ? 0 : Math.sqrt(ms / whole), title: ms === undefined ? null : `${does}: ${duration(ms)}` });
    cell.classList.toggle("now", now);
    cell.classList.toggle("never", ms === undefined);
    cell.hidden = !isUsed(shown, state);
    cell.style.setProperty("--done", state === "Prefilling" && now ? one.done / Math.max(1, one.prompt_tokens) : 1);
  });
  const { prompt_tokens: prompt, restored_tokens: restored, tier } = past ?? one;
  const [size, share] = row.querySelector(".of-prompt").children;
  const reused = restored ? `${number(restored)} of ${number(prompt)} tokens came from ${TIERS[tier]}` : "All of the prompt was computed";
  set(row.querySelector(".of-prompt"), { title: past?.miss ? `${reused}. ${missed(past.miss)}` : reused });
  set(size, { text: number(prompt) });
  set(share, { text: restored ? `${percent(restored, prompt)} ${tier}` : "", class: restored ? `share c-${tier}` : "share" });
  const said = answerOf(one, past, spent);
  set(row.querySelector(".of-answer"), { title: ASIDE[one.stage] ?? said.title });
  set(row.querySelector(".of-answer small"), { text: aside });
  set(row.querySelector(".of-answer span"), { text: aside ? "" : said.text });
}

function answerOf(one, past, spent) {
  const { completion_tokens: tokens = 0, decode_steps: steps = 0 } = past ?? one;
  if (!tokens) return { text: "", title: null };
  const ms = spent.Speculating ?? 0, speed = ms > 0 ? ` at ${rate((1000 * tokens) / ms)}/s` : "";
  return { text: number(tokens) + speed, title: steps ? `${(tokens / steps).toFixed(2)} tokens per decode step, in ${number(steps)} steps` : null };
}

const short = (ms) => (ms < 1 ? "<1" : ms < 10_000 ? number(ms) : `${(ms / 1000).toFixed(ms < 100_000 ? 1 : 0)}s`);

// -- prefix cache

function cache() {
  const { totals, full_cache: kept = {} } = status, restored = sum(totals.restored);
  const hits = (tier) => (totals.hits[tier] ? `${number(totals.hits[tier])} hit${totals.hits[tier] === 1 ? "" : "s"}` : "");
  const parts = ["device", "host", "disk"].map((tier) => ({ name: TIERS[tier], value: totals.restored[tier] ?? 0, class: tier, more: hits(tier) }));
  parts.push({ name: "computed", value: Math.max(0, totals.prompt_tokens - restored), class: "computed" });
  const bar = stacked(parts, number, "Where the tokens of all prompts came from");
  const tiers = [["host memory", kept.host], ["disk", kept.disk_policy === "off" ? null : kept]].filter(([, tier]) => tier?.budget);
  const rooms = tiers.map(([name, tier]) => meter(name, tier.bytes, tier.budget, `${bytes(tier.bytes)} of ${bytes(tier.budget)}, ${number(tier.entries)} entries${tier.evictions ? `, ${number(tier.evictions)} evicted` : ""}`));
  const restores = Object.entries(kept.restores ?? {}).map(([tier, one]) => `${number(one.count)} from ${TIERS[tier] ?? tier}: ${bytes(one.bytes)}${one.seconds ? `, ${bytes(one.bytes / one.seconds)}/s` : ""}`);
  $("cache-note").textContent = `${number(totals.prompt_tokens)} prompt tokens since the server started`;
  $("cache").replaceChildren(...bar, el("div", { class: "meters" }, rooms), restores.length ? el("p", { class: "note", text: `Restored: ${restores.join("; ")}` }) : "");
}

function meter(name, value, most, text) {
  const bar = el("div", { class: "bar thin", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": most, "aria-valuenow": value, "aria-valuetext": text }, el("span", { class: "c-fill", "--size": Math.min(1, value / most) }));
  return el("div", { class: "meter" }, el("p", {}, el("span", { text: name }), el("span", { text })), bar);
}

let missesFor = -1, missesDue = null;

/** The reasons are counted in the status; texts are the caller's own and asked for. */
function misses() {
  const all = sum(status.totals.misses);
  if (all === missesFor || missesDue) return;
  missesDue = setTimeout(async () => {
    missesFor = sum(status.totals.misses);
    missesDue = null;
    try {
      drawMisses((await (await call(ofReplica("debug/misses"))).json()).data);
    } catch {
      missesFor = -1; // asked again with the next status
    }
  }, 300);
}

function drawMisses(last) {
  const reasons = Object.entries(status.totals.misses).sort((one, other) => other[1] - one[1]);
  const counts = el("ul", { class: "reasons" }, reasons.map(([reason, count]) => el("li", {}, el("b", { text: number(count) }), el("span", { text: missed(reason) }))));
  const told = last.filter((one) => one.diverged_at >= ALIKE).slice(0, MOST_MISSES);
  const texts = told.map((one) =>
    el("li", {}, el("p", { class: "which" }, el("time", { datetime: new Date(1000 * one.at).toISOString(), text: new Date(1000 * one.at).toLocaleTimeString() }), el("span", { text: `${number(one.restored_tokens)} of ${number(one.prompt_tokens)} tokens were reused` })), ...explained(one)),
  );
  $("misses").replaceChildren(reasons.length ? counts : el("p", { class: "note", text: "No request has missed anything yet." }), texts.length ? el("ol", { class: "texts" }, texts) : "");
}

// -- speculation

/** What a decode step proposes at most: tokens of the draft, and copies of earlier text. */
function proposalLimits({ max_proposals: drafted = 0, max_copied: copied = 0 } = {}) {
  const parts = [drafted && `${number(drafted)} draft tokens`, copied && `${number(copied)} copied tokens`].filter(Boolean);
  return parts.length ? `up to ${parts.join(" or ")} per step` : "no draft";
}

function speculation() {
  const { totals, recent, runtime, settings } = status, draft = runtime?.draft_residency?.draft;
  $("speculation-note").textContent = proposalLimits(settings);
  const lines = [
    ["proposed", number(totals.proposed)],
    ["accepted", `${number(totals.accepted)} (${percent(totals.accepted, totals.proposed)})`],
    ["decode steps", number(totals.decode_steps)],
    draft ? ["draft", `${draft.state}${draft.loads ? `, loaded ${number(draft.loads)} times` : ""}`] : null,
  ].filter(Boolean);
  const steps = recent.filter((one) => one.decode_steps).slice(0, 16).reverse();
  const top = Math.max(2, ...steps.map((one) => one.completion_tokens / one.decode_steps));
  const columns = el("ol", { class: "columns", "aria-label": "Tokens per decode step of the last requests" });
  for (const one of steps) {
    const each = one.completion_tokens / one.decode_steps;
    const why = one.speculation ? `; the draft stopped proposing: ${unproposed(one.speculation)}` : "";
    columns.append(el("li", { "--size": each / top, title: `Request ${number(one.id)}: ${each.toFixed(2)} tokens per step${why}` }, el("span", { text: each.toFixed(1) })));
  }
  const reasons = new Map();
  for (const one of recent) if (one.speculation) reasons.set(one.speculation, (reasons.get(one.speculation) ?? 0) + 1);
  const why = [...reasons].map(([reason, count]) => `${unproposed(reason)} (${count} of the last ${recent.length})`).join("; ");
  $("speculation").replaceChildren(facts(lines), steps.length ? el("h3", { text: "Tokens per step, last requests" }) : "", steps.length ? columns : "", why ? el("p", { class: "note", text: `Why the draft stopped proposing: ${why}.` }) : "");
}

const facts = (lines) => el("dl", { class: "facts" }, lines.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));

// -- memory and slots

function memory() {
  const { memory: ledger, runtime } = status, residency = runtime?.draft_residency;
  if (!ledger) return $("memory").replaceChildren(el("p", { class: "note", text: "This server does not report its memory." }));
  const { models = {}, slots: kept = {}, buffers = {}, blocks = {} } = ledger;
  const all = (of) => Object.values(of).reduce((whole, one) => whole + one, 0);
  const parts = [
    { name: "weights", value: models.target?.device ?? 0, class: "weights" },
    { name: "draft", value: models.draft?.device ?? 0, class: "draft", more: residency?.draft ? residency.draft.state : "" },
    { name: "keys and values", value: all(kept), class: "rows" },
    { name: "buffers", value: all(buffers), class: "buffers" },
    { name: "host cache", value: blocks.host ?? 0, class: "host" },
    { name: "parked in host memory", value: (models.target?.host ?? 0) + (models.draft?.host ?? 0), class: "computed" },
  ].filter((part) => part.value > 0 || part.class === "draft");
  $("memory-note").textContent = bytes(parts.reduce((whole, part) => whole + part.value, 0));
  const shards = (ledger.shards ?? []).map((one) => [`layers ${one.layers[0]} to ${one.layers[1] - 1}`, `${one.device}, ${bytes(all(one.bytes))}`]);
  $("memory").replaceChildren(...stacked(parts, bytes, "Memory by purpose"), facts([...shards, residency ? ["draft weights", `${residency.policy}${residency.draft ? `, ${residency.draft.after_use} after use` : ""}`] : ["", ""]].filter(([name]) => name)));
}

function slots() {
  const most = status.settings?.max_context ?? status.default_generation_settings.n_ctx;
  const busy = status.slots.filter((slot) => slot.is_processing).length;
  $("slots-note").textContent = `${busy} busy; up to ${number(most)} tokens each`;
  keyed(
    $("slots"),
    status.slots,
    (slot) => slot.id,
    (slot) => el("li", {}, el("b", { text: slot.id }), el("span"), el("div", { class: "bar thin", "aria-hidden": "true" }, el("span", { class: "c-fill" }))),
    (shown, slot) => {
      shown.className = slot.is_processing ? "busy" : "idle";
      const name = STAGES.find(([state]) => state === slot.state)?.[1] ?? slot.state?.toLowerCase();
      set(shown.querySelector("span"), { text: slot.is_processing ? `request ${number(slot.request)}, ${name}` : slot.kept_tokens ? `${number(slot.kept_tokens)} tokens kept` : "empty" });
      set(shown.querySelector(".c-fill"), { "--size": Math.min(1, slot.kept_tokens / most) });
    },
  );
}
