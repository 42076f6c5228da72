// Mouse, keys and search; then what is shown first.

// --- hands ---

function dragged(element, moved, clicked) {
  let start = null, far = false;
  element.addEventListener("pointerdown", (event) => { if (event.button === 0) { start = { x: event.offsetX, y: event.offsetY, view: { ...view }, scroll: $("rows").scrollTop }; far = false; element.setPointerCapture(event.pointerId); } });
  element.addEventListener("pointermove", (event) => { if (start && (far ||= Math.hypot(event.offsetX - start.x, event.offsetY - start.y) > 4)) moved(start, event); });
  element.addEventListener("pointerup", (event) => { if (start && !far) clicked(event.offsetX, event.offsetY, element.clientWidth); start = null; });
  element.addEventListener("pointercancel", () => { start = null; });
}
const panned = (start, event) => look(start.view.from - (event.offsetX - start.x) * (start.view.to - start.view.from) / wide(event.target.clientWidth), start.view.to - (event.offsetX - start.x) * (start.view.to - start.view.from) / wide(event.target.clientWidth));
dragged($("bars"), (start, event) => { panned(start, event); $("rows").scrollTop = start.scroll - (event.offsetY - start.y); }, (x, y, width) => {
  const row = Math.floor((y + $("rows").scrollTop) / ROW), at = timeAt(x, width), slack = (view.to - view.from) / wide(width) * 4;
  if (row >= rows) return;
  const [, other] = rowEvents(row, at, at + slack);
  choose(row, x < GUTTER ? -1 : touching.events[Math.max(touching.first[row], other - 1)]);
});
dragged($("tracks"), panned, (x, y, width) => {
  const lane = Math.floor((y - 18 - AREA) / LANE), at = timeAt(x, width);
  if (lane < 0 || lane >= lanes.length || x < GUTTER) return;
  let [low, high] = [laneFirst[lane], laneFirst[lane + 1]];
  while (low < high) { const middle = (low + high) >> 1; if (launches.start[launchesOf[middle]] > at) high = middle; else low = middle + 1; }
  if (low > laneFirst[lane]) chooseLaunch(launchesOf[low - 1]);
});
const overviewAt = (x) => Math.min(end, Math.max(0, (x - GUTTER) / wide($("overview").clientWidth) * end));
dragged($("overview"), (start, event) => look(...[overviewAt(start.x), overviewAt(event.offsetX)].sort((one, other) => one - other)), (x) => pan(overviewAt(x) - (view.from + view.to) / 2));
for (const element of [$("bars"), $("tracks"), $("overview")])
  element.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey || element !== $("bars") && !sideways) { event.preventDefault(); zoom(Math.exp(event.deltaY * .002), element === $("overview") ? undefined : timeAt(event.offsetX, element.clientWidth)); }
    else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) { event.preventDefault(); pan(sideways * (view.to - view.from) / wide(element.clientWidth)); }
  }, { passive: false });

const actions = {
  in: () => zoom(.5), out: () => zoom(2), fit: () => look(0, end),
  one: () => { if (chosen.row >= 0) { const of = barsOf.subarray(barFirst[chosen.row], barFirst[chosen.row + 1]); const [from, to] = of.length ? [bars.start[of[0]], bars.stop[of[of.length - 1]]] : [times[chosen.event], times[chosen.event]]; look(from - (to - from) * .05, to + (to - from) * .05); } },
  theme: () => { const dark = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim() !== "#fff"; document.documentElement.dataset.theme = dark ? "light" : "dark"; retheme(); },
};
for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => actions[button.dataset.do]());
const keys = {
  ArrowLeft: () => pan((view.from - view.to) / 8), ArrowRight: () => pan((view.to - view.from) / 8), "+": actions.in, "=": actions.in, "-": actions.out, f: actions.fit, z: actions.one,
  ArrowDown: () => choose(Math.min(rows - 1, chosen.row + 1)), ArrowUp: () => choose(Math.max(0, chosen.row - 1)), Home: () => choose(0), End: () => choose(rows - 1),
  PageDown: () => choose(Math.min(rows - 1, chosen.row + 20)), PageUp: () => choose(Math.max(0, chosen.row - 20)), n: () => move(1), p: () => move(-1),
  Enter: () => { if (chosen.row < 0) choose(0); $("detail").focus(); }, Escape: () => $("rows").focus(), "/": () => { $("search").focus(); $("search").select(); },
};
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, button, aside");
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || (typing && event.key !== "Escape" && !(event.key === "/" && event.target.tagName !== "INPUT"))) return;
  event.preventDefault();
  keys[event.key]();
});
$("tools").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = Number($("search").value.replace(/[\s,._]/g, "")), row = $("search").value.trim() ? data.requests.indexOf(wanted) : -1;
  if (row < 0) { $("detail").replaceChildren(heading("Not found"), made("p", `There is no request ${$("search").value.trim() || "without a number"} in this trace.`)); $("said").textContent = "no such request"; return; }
  choose(row, -1, true);
});

// --- first things ---

function headed() {
  const about = data.about, settings = Object.entries(about.settings).map(([name, value]) => `${name} ${value}`).join(", ");
  $("name").textContent = about.name;
  $("facts").textContent = `${number(rows)} request${rows === 1 ? "" : "s"}, ${number(times.length)} events (${number(data.seqs[0])} to ${number(data.seqs[1])}), ${clock(end)}. Rekindle ${about.engine}, model ${about.model || "unnamed"}, identity ${about.identity.slice(0, 12)}${about.redacted ? ", redacted" : ""}.`;
  $("settings").querySelector("p").textContent = `${settings}.`;
  $("trouble").hidden = !about.trouble.length;
  $("trouble").textContent = about.trouble.join("\n");
  const used = new Set(bars.kind);
  for (const [kind, state] of data.states.entries()) if (used.has(kind)) $("legend").append(made("li", null, swatch(state), state));
  $("legend").append(made("li", "▲ prefix found (d: disk, h: host memory)"), made("li", "✕ missed, failed or cancelled"));
  hits();
}
function hits() {
  const tokens = { device: 0, host: 0, disk: 0, computed: 0 }, misses = new Map();
  for (const ask of closing) {
    if (ask < 0) continue;
    const restored = effects.field(ask, "report.restored_tokens") || 0, tier = effects.field(ask, "report.tier");
    tokens.computed += (effects.field(ask, "report.prompt_tokens") || 0) - restored;
    if (tier in tokens) tokens[tier] += restored;
    const miss = String(effects.field(ask, "report.miss") || "").split(":")[0];
    if (miss) misses.set(miss, (misses.get(miss) || 0) + 1);
  }
  const all = Object.values(tokens).reduce((sum, one) => sum + one, 0), box = $("hits");
  box.replaceChildren(made("b", `${number(all)} prompt tokens`));
  for (const [tier, count] of Object.entries(tokens)) box.append(made("span", `${tier === "computed" ? "computed" : `from ${tier}`} ${percent(count, all)}`));
  const most = [...misses].sort((one, other) => other[1] - one[1]).slice(0, 6);
  if (most.length) box.append(made("span", `why no more was restored: ${most.map(([why, count]) => `${why} ${number(count)}`).join(", ")}`));
}
function retheme() {
  themed();
  for (const [at, canvas] of [...$("legend").querySelectorAll("canvas")].entries()) canvas.replaceWith(swatch(canvas.parentElement.textContent));
  redraw();
}
themed();
headed();
$("all").style.height = `${Math.max(1, rows) * ROW}px`;
$("rows").addEventListener("scroll", redraw, { passive: true });
new ResizeObserver(redraw).observe($("chart"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
$("detail").append(heading("Choose a request"), made("p", "Click a bar, a launch or a row, or use the arrow keys. You then see here what happened, and what the engine asked for."));
draw();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
