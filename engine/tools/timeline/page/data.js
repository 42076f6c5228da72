// What is embedded in the page: unpacked, and who has which of it. The scripts are one module, in this order.

const $ = (id) => document.getElementById(id);
const letters = atob($("data").textContent.trim()), bytes = new Uint8Array(letters.length);
for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
const data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
$("data").remove();

const summed = (numbers) => { let sum = 0; return Float64Array.from(numbers, (one) => sum += one); };
const column = (values) => Array.isArray(values) ? (at) => values[at]
  : "all" in values ? () => values.all : (at) => values.texts[values.of[at]];

class Things { // events or effects: of each, its class and its fields
  constructor(packed) {
    this.order = Int16Array.from(packed.order);
    this.names = packed.kinds.map(([name]) => name);
    this.columns = packed.kinds.map(([, fields]) => Object.entries(fields).map(([name, values]) => [name, column(values)]));
    const seen = new Int32Array(this.names.length);
    this.place = Int32Array.from(this.order, (kind) => seen[kind]++);
  }
  name(at) { return this.names[this.order[at]]; }
  fields(at) { return this.columns[this.order[at]].map(([name, value]) => [name, value(this.place[at])]); }
  field(at, wanted) {
    const found = this.columns[this.order[at]].find(([name]) => name === wanted);
    return found && found[1](this.place[at]);
  }
}

const times = summed(data.times), events = new Things(data.events), effects = new Things(data.effects);
const last = Math.max(0, times.length - 1), end = Math.max(1, times[last] || 0), rows = data.requests.length;
const askStart = new Int32Array(times.length + 1);
data.effectCounts.forEach((count, at) => askStart[at + 1] = askStart[at] + count);

class Spans { // from one event to another
  constructor(packed) {
    const starts = summed(packed.start);
    this.owner = Int32Array.from(packed.owner);
    this.kind = Int32Array.from(packed.kind);
    this.first = Int32Array.from(starts);
    this.open = Uint8Array.from(packed.took, (took) => took < 0);
    this.last = Int32Array.from(packed.took, (took, at) => took < 0 ? last : starts[at] + took);
    this.start = Float64Array.from(this.first, (event) => times[event]);
    this.stop = Float64Array.from(this.last, (event) => times[event]);
  }
  get length() { return this.first.length; }
}
const bars = new Spans(data.bars), launches = new Spans(data.launches), store = new Spans(data.store);

function grouped(count, owners) { // who has which, in order: [first of each, all of them]
  const first = new Int32Array(count + 1), all = new Int32Array(owners.length);
  for (const owner of owners) if (owner >= 0) first[owner + 1]++;
  for (let at = 0; at < count; at++) first[at + 1] += first[at];
  const next = first.slice();
  owners.forEach((owner, at) => { if (owner >= 0) all[next[owner]++] = at; });
  return [first, all];
}
const [barFirst, barsOf] = grouped(rows, bars.owner);
const lanes = [...new Set(launches.owner)].sort((one, other) => one - other);
const laneOf = new Map(lanes.map((lane, at) => [lane, at]));
const [laneFirst, launchesOf] = grouped(lanes.length, launches.owner.map((lane) => laneOf.get(lane)));

// Every event that touches a row: its own, those that ask something for it, and those that moved it.
const touching = (() => {
  const seen = new Int32Array(rows).fill(-1), owners = [], found = [];
  let bar = 0;
  const touch = (row, event) => { if (row >= 0 && seen[row] !== event) { seen[row] = event; owners.push(row); found.push(event); } };
  for (let event = 0; event < times.length; event++) {
    touch(data.eventRows[event], event);
    for (let ask = askStart[event]; ask < askStart[event + 1]; ask++) touch(data.effectRows[ask], event);
    for (; bar < bars.length && bars.first[bar] === event; bar++) touch(bars.owner[bar], event);
  }
  const [first, all] = grouped(rows, owners);
  return { first, events: all.map((at) => found[at]) };
})();
const closing = new Int32Array(rows).fill(-1);
const closeKind = effects.names.indexOf("CloseStream");
effects.order.forEach((kind, ask) => { if (kind === closeKind && data.effectRows[ask] >= 0) closing[data.effectRows[ask]] = ask; });
const launchOf = new Map();
for (let at = 0; at < launches.length; at++) launchOf.set(launches.kind[at], at);
