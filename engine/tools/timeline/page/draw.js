// Draws the overview, the lanes, the store, and the rows that are in sight, whenever the view changes.

const ROW = 18, GUTTER = 96, LANE = 30, AREA = 40, MARK = 5, CARDS = 200, CLOSEST_US = 20;
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 360, 720, 1440].map((minutes) => minutes * 6e7);
const LOUD = new Set(["PrefixFound", "PrefixMissed", "BlocksRestored", "StoreFailed", "DeviceFailed", "Cancelled", "SlotsLost"]);

// --- what is seen ---

const view = { from: 0, to: end };
let chosen = { row: -1, event: -1, launch: -1 }, due = false;
const wide = (width) => Math.max(1, width - GUTTER - 8);
const scaleX = (width) => { const by = wide(width) / (view.to - view.from); return (us) => GUTTER + (us - view.from) * by; };
const timeAt = (x, width) => view.from + (x - GUTTER) * (view.to - view.from) / wide(width);
const redraw = () => { if (!due) { due = true; requestAnimationFrame(() => { due = false; draw(); }); } };

function look(from, to) {
  const span = Math.min(end, Math.max(CLOSEST_US, to - from));
  view.from = Math.min(Math.max(0, from - (span - (to - from)) / 2), end - span);
  view.to = view.from + span;
  redraw();
}
function zoom(by, at = (view.from + view.to) / 2) { look(at - (at - view.from) * by, at + (view.to - at) * by); }
function pan(by) { look(view.from + by, view.to + by); }

function coverage(spans, width, from, to, kinds, kindOf) { // per pixel and kind, how many are under way, on average
  const found = Array.from({ length: kinds }, () => new Float64Array(width + 1)), by = width / (to - from);
  const inside = Array.from({ length: kinds }, () => new Float64Array(width + 2));
  for (let at = 0; at < spans.length; at++) {
    if (spans.stop[at] < from || spans.start[at] > to) continue;
    const kind = kindOf(at);
    if (kind < 0) continue;
    const one = Math.max(0, (spans.start[at] - from) * by), other = Math.min(width, (spans.stop[at] - from) * by);
    const first = Math.floor(one), final = Math.floor(other);
    if (first === final) found[kind][first] += other - one;
    else {
      found[kind][first] += first + 1 - one;
      found[kind][final] += other - final;
      inside[kind][first + 1]++;
      inside[kind][final]--;
    }
  }
  inside.forEach((steps, kind) => { let now = 0; for (let x = 0; x <= width; x++) found[kind][x] += now += steps[x]; });
  return found;
}
function areas(context, layers, top, height, left, most) { // stacked; layers: [state, per pixel]
  const base = new Float64Array(layers.length ? layers[0][1].length : 0);
  for (const [state, values] of layers) {
    if (!values.some((value) => value > 0)) continue;
    context.beginPath();
    for (let x = 0; x < values.length; x++) context.lineTo(left + x, top + height - height * base[x] / most);
    for (let x = values.length - 1; x >= 0; x--) context.lineTo(left + x, top + height - height * (base[x] += values[x]) / most);
    context.fillStyle = paint(context, state);
    context.fill();
  }
  return base;
}
const highest = (layers) => layers.reduce((sum, [, values]) => { values.forEach((value, x) => sum[x] += value); return sum; },
  new Float64Array(layers.length ? layers[0][1].length : 0)).reduce((most, value) => Math.max(most, value), 0);

// --- drawing ---

function draw() {
  // Only the rows have a scroll bar. The canvases above are as wide as what it leaves, so one moment has one x everywhere.
  $("chart").style.setProperty("--scrollbar", `${$("rows").offsetWidth - $("rows").clientWidth}px`);
  drawOverview();
  drawTracks();
  drawRows();
}

let overview = null; // of all: drawn once for a width and a theme
function drawOverview() {
  const [context, width] = canvasOf($("overview"), 64), inner = Math.floor(wide(width));
  const key = `${width} ${ratio()} ${theme.paper}`;
  if (!overview || overview.key !== key) {
    const counts = coverage(bars, inner, 0, end, data.states.length, (at) => bars.kind[at]);
    const layers = data.states.map((state, kind) => [state, counts[kind]]);
    overview = { key, layers, most: Math.max(1, highest(layers)) };
  }
  areas(context, overview.layers, 6, 44, GUTTER, overview.most);
  label(context, "all requests", 20, `up to ${number(Math.ceil(overview.most - 1e-9))} at once`);
  const x = (us) => GUTTER + us / end * inner, [one, other] = [x(view.from), x(view.to)];
  context.fillStyle = theme.paper;
  context.globalAlpha = .62;
  context.fillRect(GUTTER, 0, one - GUTTER, 52);
  context.fillRect(other, 0, GUTTER + inner - other, 52);
  context.globalAlpha = 1;
  context.strokeStyle = theme.accent;
  context.strokeRect(one + .5, .5, Math.max(2, other - one - 1), 51);
  context.fillStyle = theme.dim;
  context.fillText("0", GUTTER, 58);
  context.textAlign = "right";
  context.fillText(clock(end), GUTTER + inner, 58);
  context.textAlign = "left";
}
function label(context, text, y, more) {
  context.fillStyle = theme.ink;
  context.fillText(text, 8, y, GUTTER - 12);
  if (more) { context.fillStyle = theme.dim; context.fillText(more, 8, y + 13, GUTTER - 12); }
}

function drawTracks() {
  const height = 18 + AREA + lanes.length * LANE + AREA + 6, [context, width] = canvasOf($("tracks"), height);
  const inner = Math.floor(wide(width)), x = scaleX(width);
  drawAxis(context, width, height, true);
  let top = 18;
  const counts = coverage(bars, inner, view.from, view.to, data.states.length, (at) => bars.kind[at]);
  const seated = data.states.map((state, kind) => [state, counts[kind]]).filter(([state]) => state !== "Waiting");
  const queue = ["Waiting", counts[data.states.indexOf("Waiting")]];
  const slots = data.about.settings.slots, most = Math.max(slots, highest([...seated, queue]));
  areas(context, [...seated, queue], top, AREA - 6, GUTTER, most);
  const line = top + (AREA - 6) * (1 - slots / most);
  context.strokeStyle = theme.ink;
  context.setLineDash([4, 3]);
  context.beginPath(); context.moveTo(GUTTER, line + .5); context.lineTo(GUTTER + inner, line + .5); context.stroke();
  context.setLineDash([]);
  label(context, "slots, queue", top + 10, `${number(slots)} slots ┄`);
  top += AREA;
  for (const [at, lane] of lanes.entries()) { drawLane(context, at, top, inner, x); label(context, `lane ${lane}`, top + LANE / 2 - 2); top += LANE; }
  const asked = ["FindPrefix", "RestoreBlocks"];
  const waiting = coverage(store, inner, view.from, view.to, 2, (at) => asked.indexOf(effects.name(store.kind[at])));
  const layers = asked.map((name, kind) => [WORK[name], waiting[kind]]), top1 = Math.max(1, highest(layers));
  areas(context, layers, top, AREA - 6, GUTTER, top1);
  label(context, "store", top + 10, store.length ? `up to ${number(Math.ceil(top1 - 1e-9))} at once` : "not asked");
}
function drawAxis(context, width, height, named) {
  const span = view.to - view.from, rough = span / Math.max(2, wide(width) / 110), ten = 10 ** Math.floor(Math.log10(rough));
  const x = scaleX(width), steps = rough > 3e7 ? CLOCK : [1, 2, 5, 10].map((by) => by * ten);
  const step = steps.find((by) => by >= rough) || ten * 10;
  context.strokeStyle = theme.line;
  context.fillStyle = theme.dim;
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    context.beginPath(); context.moveTo(x(at), 0); context.lineTo(x(at), height); context.stroke();
    if (named && x(at) < width - 50) context.fillText(clock(at), x(at) + 3, 8);
  }
}
function visible(first, count, startOf, stopOf) { // of spans in order, those that are seen: [first, past the last]
  const search = (test) => { let [low, high] = [0, count]; while (low < high) { const middle = (low + high) >> 1; if (test(first + middle)) high = middle; else low = middle + 1; } return first + low; };
  return [search((at) => stopOf(at) >= view.from), search((at) => startOf(at) > view.to)];
}
function drawLane(context, lane, top, inner, x) {
  const of = (at) => launchesOf[at];
  const [one, other] = visible(laneFirst[lane], laneFirst[lane + 1] - laneFirst[lane], (at) => launches.start[of(at)], (at) => launches.stop[of(at)]);
  const height = LANE - 8;
  if (other - one > 2 * inner) {
    const names = effects.names;
    const part = { length: other - one, start: new Float64Array(other - one), stop: new Float64Array(other - one) };
    for (let at = one; at < other; at++) { part.start[at - one] = launches.start[of(at)]; part.stop[at - one] = launches.stop[of(at)]; }
    const counts = coverage(part, inner, view.from, view.to, names.length, (at) => effects.order[launches.kind[of(one + at)]]);
    areas(context, names.map((name, kind) => [WORK[name] || "Waiting", counts[kind]]), top, height, GUTTER, 1);
    return;
  }
  for (let at = one; at < other; at++) {
    const launch = of(at), left = Math.max(GUTTER, x(launches.start[launch])), right = Math.min(GUTTER + inner, x(launches.stop[launch]));
    context.fillStyle = paint(context, WORK[effects.name(launches.kind[launch])]);
    context.fillRect(left, top, Math.max(.5, right - left - .5), height);
    if (launch === chosen.launch) outline(context, left, top, right - left, height);
    const size = data.launches.together[launch];
    plate(context, size > 1 ? `×${size}` : effects.name(launches.kind[launch]).replace("Run", ""), left, top + height / 2, right - left, WORK[effects.name(launches.kind[launch])]);
  }
}
function outline(context, left, top, width, height) {
  context.strokeStyle = theme.ink;
  context.lineWidth = 2;
  context.strokeRect(left, top, Math.max(2, width), height);
  context.lineWidth = 1;
}
function plate(context, text, left, middle, width, state, marks = []) { // a word in a bar that has room for it, behind its marks
  if (width < 22) return;
  const size = context.measureText(text).width, right = left + width;
  for (const [from, to] of marks) if (from < left + size + 8 && to > left) left = to;
  if (left + size + 8 > right) return;
  context.fillStyle = (STYLES[state] || ["#888"])[0];
  context.fillRect(left + 2, middle - 6, size + 4, 12);
  context.fillStyle = "#000";
  context.fillText(text, left + 4, middle);
}

function drawRows() {
  const box = $("rows"), [context, width] = canvasOf($("bars"), box.clientHeight), inner = wide(width), x = scaleX(width);
  drawAxis(context, width, box.clientHeight, false);
  const first = Math.floor(box.scrollTop / ROW), count = Math.ceil(box.clientHeight / ROW) + 1;
  for (let row = first; row < Math.min(rows, first + count); row++) {
    const top = row * ROW - box.scrollTop;
    if (row === chosen.row) { context.fillStyle = theme.raised; context.fillRect(0, top, width, ROW); }
    let right = GUTTER;
    const marks = marksOf(row, inner, x), taken = marks.filter(({ loud }) => loud).map(({ name, left }) => [left - MARK, left + (name === "PrefixFound" ? 3 * MARK : MARK)]);
    for (let at = barFirst[row]; at < barFirst[row + 1]; at++) right = Math.max(right, drawBar(context, barsOf[at], top, inner, x, taken));
    drawMarks(context, row, marks, top, x);
    drawEnd(context, row, top, right, width);
    context.fillStyle = theme.paper;
    context.fillRect(0, top, GUTTER - 2, ROW);
    if (row === chosen.row) { context.fillStyle = theme.raised; context.fillRect(0, top, GUTTER - 2, ROW); }
    context.fillStyle = row === chosen.row ? theme.accent : theme.ink;
    context.textAlign = "right";
    context.fillText(number(data.requests[row]), GUTTER - 8, top + ROW / 2, GUTTER - 12);
    context.textAlign = "left";
  }
}
function drawBar(context, bar, top, inner, x, taken) { // taken: where marks are, which no word is written on
  const left = x(bars.start[bar]), right = x(bars.stop[bar]), state = data.states[bars.kind[bar]];
  if (right < GUTTER || left > GUTTER + inner) return Math.min(right, GUTTER + inner);
  const [from, to] = [Math.max(GUTTER, left), Math.min(GUTTER + inner, right)];
  context.fillStyle = paint(context, state);
  context.fillRect(from, top + 3, Math.max(1, to - from), ROW - 6);
  plate(context, state, from, top + ROW / 2, to - from, state, taken);
  if (bars.open[bar]) { context.fillStyle = theme.dim; context.fillText("…", to + 1, top + ROW / 2); }
  return to;
}
function rowEvents(row, from, to) { // those that touch it, in a span of time: [first, past the last]
  const search = (test) => { let [low, high] = [touching.first[row], touching.first[row + 1]]; while (low < high) { const middle = (low + high) >> 1; if (test(times[touching.events[middle]])) high = middle; else low = middle + 1; } return low; };
  return [search((time) => time >= from), search((time) => time > to)];
}
function marksOf(row, inner, x) { // what is marked of the events in sight; loud: with a shape, else with a tick
  const all = touching.events.subarray(touching.first[row], touching.first[row + 1]);
  const [one, other] = rowEvents(row, view.from, view.to), close = x(times[all[all.length - 1]]) - x(times[all[0]]) > 48;
  if (!close || other - one >= 5000) return []; // what is smaller would be all marks
  const near = (other - one) * 5 < inner, found = [];
  for (let at = one; at < other; at++) {
    const event = touching.events[at], name = events.name(event), loud = data.eventRows[event] === row && LOUD.has(name);
    if (loud || near) found.push({ event, name, loud, left: x(times[event]) });
  }
  return found;
}
function drawMarks(context, row, marks, top, x) {
  for (const { event, name, loud, left } of marks) {
    if (loud) mark(context, name, event, left, top);
    else { context.fillStyle = theme.ink; context.fillRect(left - .5, top + ROW - 4, 1, 3); }
  }
  if (row === chosen.row && chosen.event >= 0) { context.fillStyle = theme.accent; context.fillRect(x(times[chosen.event]) - 1, top, 2, ROW); }
}
function mark(context, name, event, left, top) { // found: a triangle, with its tier's letter; missed or failed: a cross
  const good = name === "PrefixFound" || name === "BlocksRestored", middle = top + ROW / 2;
  context.strokeStyle = theme.paper;
  context.lineWidth = 3;
  const shape = () => {
    context.beginPath();
    if (good) { context.moveTo(left, top + 3); context.lineTo(left + MARK, top + ROW - 4); context.lineTo(left - MARK, top + ROW - 4); context.closePath(); }
    else { context.moveTo(left - 4, middle - 4); context.lineTo(left + 4, middle + 4); context.moveTo(left + 4, middle - 4); context.lineTo(left - 4, middle + 4); }
  };
  shape(); context.stroke();
  context.lineWidth = 1.5;
  context.strokeStyle = context.fillStyle = good ? theme.ink : name === "PrefixMissed" ? theme.dim : theme.bad;
  shape(); if (good) context.fill(); else context.stroke();
  context.lineWidth = 1;
  if (name === "PrefixFound") { context.fillStyle = theme.ink; context.fillText(String(events.field(event, "tier")).slice(0, 1), left + 6, middle); }
}
function drawEnd(context, row, top, right, width) { // how it ended and what was restored, where there is room
  if (closing[row] < 0 || right < GUTTER || right > width - 60) return;
  const finish = effects.field(closing[row], "finish"), restored = effects.field(closing[row], "report.restored_tokens");
  const tier = effects.field(closing[row], "report.tier"), bad = !["stop", "length"].includes(finish);
  context.fillStyle = bad ? theme.bad : theme.dim;
  const text = `${bad ? "✕ " : ""}${finish}${restored ? `, ${number(restored)} from ${tier}` : ""}`;
  if (right + 6 + context.measureText(text).width < width) context.fillText(text, right + 6, top + ROW / 2);
}
