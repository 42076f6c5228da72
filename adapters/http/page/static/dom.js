// Making elements. Text becomes text, never markup.

export const $ = (id) => document.getElementById(id);

/** An element with properties (class, text, on..., attributes) and children; what is null is left out. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  set(made, properties);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function set(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else if (name === "text") {
      if (element.textContent !== String(value)) element.textContent = value;
    } else if (name === "class") element.setAttribute("class", value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  return element;
}

/** Makes `parent`'s children those of `items`: kept by key where they were there, so that focus and animations stay. */
export function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = null;
  for (const item of items) {
    const name = String(key(item));
    let child = old.get(name);
    old.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    update(child, item);
    const wanted = before === null ? parent.firstElementChild : before.nextElementSibling;
    if (wanted !== child) parent.insertBefore(child, wanted);
    before = child;
  }
  for (const child of old.values()) child.remove();
}

const SVG = "http://www.w3.org/2000/svg";

/** A line of the last values, as wide as `most` of them. */
export function spark(values, most, label) {
  const svg = document.createElementNS(SVG, "svg");
  set(svg, { class: "spark", viewBox: `0 0 ${most - 1} 20`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const top = Math.max(...values, 1e-9), left = most - values.length;
  const points = values.map((value, n) => `${left + n},${(19 - (18 * value) / top).toFixed(2)}`);
  if (points.length > 1) {
    const area = document.createElementNS(SVG, "polygon");
    set(area, { points: `${left},20 ${points.join(" ")} ${most - 1},20` });
    const line = document.createElementNS(SVG, "polyline");
    set(line, { points: points.join(" ") });
    svg.append(area, line);
  }
  return svg;
}

/** A bar of parts: [{name, value, class}], with a legend that says it in words. */
export function stacked(parts, format, label) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  const bar = el("div", { class: "bar", role: "img", "aria-label": label });
  const legend = el("ul", { class: "key" });
  for (const part of parts) {
    if (part.value > 0) bar.append(el("span", { class: `c-${part.class}`, "--size": part.value / whole }));
    legend.append(
      el("li", { class: `c-${part.class}` }, el("span", { text: part.name }), el("b", { text: format(part.value) }), part.more ? el("small", { text: part.more }) : null),
    );
  }
  return [bar, legend];
}

export const number = (value) => Math.round(value).toLocaleString("en");
export const rate = (value) => (value >= 100 ? number(value) : value.toFixed(1));
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) (value /= 1024), unit++;
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function duration(ms) {
  if (ms < 1) return "<1 ms";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}
