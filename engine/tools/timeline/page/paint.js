// Words, colours and patterns: what is told by a colour is told by a pattern or a letter, too.

const STYLES = { // colour and pattern of each state; what lanes and store do for it looks the same
  Waiting: ["#98a1ab", "dots"], LookingUp: ["#e69f00", "vertical"], Restoring: ["#009e73", "falling"],
  LoadingScorer: ["#b08fd0", "dense"], Compressing: ["#8f5fb5", "grid"], UnloadingScorer: ["#b08fd0", "plain"], UnparkingDraft: ["#c9b400", "dense"], Prefilling: ["#2f7fc1", "plain"],
  Speculating: ["#6fc0ee", "rising"], Snapshotting: ["#d287b0", "horizontal"], Parking: ["#a39a5c", "cross"],
  Draining: ["#d5702a", "cross"], Recovering: ["#c4403a", "falling"], Yielding: ["#8c6a5c", "vertical"],
};
const WORK = { RunPrefill: "Prefilling", RunDecode: "Speculating", SaveSnapshot: "Snapshotting", LoadModel: "UnparkingDraft",
  UnloadModel: "Parking", CompressPrompt: "Compressing", FindPrefix: "LookingUp", RestoreBlocks: "Restoring" };

// --- words ---

const number = (value) => value.toLocaleString("en");
function clock(us, precise) {
  if (precise) return us < 1e6 ? `${(us / 1e3).toFixed(3)} ms` : `${(us / 1e6).toFixed(6)} s`;
  if (us < 1e3) return `${+us.toPrecision(3)} µs`;
  if (us < 1e6) return `${+(us / 1e3).toPrecision(4)} ms`;
  return us < 12e7 ? `${+(us / 1e6).toPrecision(5)} s` : us < 72e8 ? `${+(us / 6e7).toFixed(1)} min` : `${(us / 36e8).toFixed(1)} h`;
}
function made(tag, text, ...children) {
  const element = document.createElement(tag);
  if (text !== null) element.textContent = text;
  element.append(...children);
  return element;
}
const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "0 %";
const said = (value) => value === null || value === undefined ? "none" : typeof value === "number" ? number(value) : String(value);

// --- colours and patterns ---

const ratio = () => window.devicePixelRatio || 1;
let theme = {}, patterns = new Map();
function themed() {
  const style = getComputedStyle(document.documentElement);
  theme = Object.fromEntries(["paper", "ink", "dim", "line", "raised", "accent", "bad"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  patterns = new Map();
}
function tile(color, kind) {
  const canvas = document.createElement("canvas"), size = kind === "dense" ? 4 : 8, context = canvas.getContext("2d");
  canvas.width = canvas.height = size;
  context.fillStyle = color;
  context.fillRect(0, 0, size, size);
  context.strokeStyle = context.fillStyle = "rgba(0,0,0,.38)";
  const line = (...at) => { context.beginPath(); context.moveTo(at[0], at[1]); context.lineTo(at[2], at[3]); context.stroke(); };
  if (kind === "rising" || kind === "cross") for (const by of [-8, 0, 8]) line(by, 8, by + 8, 0);
  if (kind === "falling" || kind === "cross") for (const by of [-8, 0, 8]) line(by, 0, by + 8, 8);
  if (kind === "horizontal" || kind === "grid") line(0, 2.5, 8, 2.5);
  if (kind === "vertical" || kind === "grid") line(2.5, 0, 2.5, 8);
  if (kind === "dots" || kind === "dense") context.fillRect(1, 1, 2, 2);
  if (kind === "dots") context.fillRect(5, 5, 2, 2);
  return canvas;
}
function paint(context, state) {
  if (!patterns.has(state)) {
    const [color, kind] = STYLES[state] || ["#888", "plain"];
    patterns.set(state, kind === "plain" ? color : context.createPattern(tile(color, kind), "repeat"));
  }
  return patterns.get(state);
}
function canvasOf(element, height) { // cleared, as large as it is shown
  const width = element.clientWidth, scale = ratio(), context = element.getContext("2d");
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (element.width !== w || element.height !== h) { element.width = w; element.height = h; element.style.height = `${height}px`; }
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}
function swatch(state) {
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  canvas.width = 52; canvas.height = 26;
  context.scale(2, 2);
  context.fillStyle = paint(context, state);
  context.fillRect(0, 0, 26, 13);
  return canvas;
}
