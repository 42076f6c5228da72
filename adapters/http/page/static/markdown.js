// Markdown as answers write it, made of elements: paragraphs, headings, lists, quotes, tables, code. Never markup.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*(\S*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*]*[^\s*])\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

/** Elements for a text; one that is not complete yet is shown as far as it goes. */
export function rendered(text) {
  return blocks(text.split("\n"));
}

function blocks(lines) {
  const made = [];
  for (let n = 0; n < lines.length; ) {
    const line = lines[n], fence = FENCE.exec(line);
    if (fence) {
      const body = [];
      for (n++; n < lines.length && !lines[n].trimStart().startsWith(fence[1]); n++) body.push(lines[n]);
      n++;
      made.push(code(body.join("\n"), fence[2]));
    } else if (!line.trim()) n++;
    else if (/^#{1,6}\s/.test(line)) {
      const level = line.indexOf(" ");
      made.push(el(`h${Math.min(6, level + 2)}`, {}, inline(line.slice(level + 1).trim())));
      n++;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      made.push(el("hr"));
      n++;
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      for (; n < lines.length && /^\s*>/.test(lines[n]); n++) quoted.push(lines[n].replace(/^\s*> ?/, ""));
      made.push(el("blockquote", {}, blocks(quoted)));
    } else if (ITEM.test(line)) n = list(lines, n, made);
    else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[n + 1] ?? "")) n = table(lines, n, made);
    else {
      const said = [];
      for (; n < lines.length && lines[n].trim() && !FENCE.test(lines[n]) && (said.length === 0 || !ITEM.test(lines[n])); n++) said.push(lines[n]);
      made.push(el("p", {}, inline(said.join("\n"))));
    }
  }
  return made;
}

function list(lines, start, made) {
  const [, indent, mark] = ITEM.exec(lines[start]), items = [];
  let n = start;
  for (; n < lines.length; n++) {
    const found = ITEM.exec(lines[n]);
    if (found && found[1].length <= indent.length) items.push([lines[n].slice(found[0].length)]);
    else if (found || /^\s{2,}\S/.test(lines[n]) || (lines[n].trim() && lines[n - 1].trim())) items.at(-1).push(lines[n].replace(/^\s{1,4}/, ""));
    else if (lines[n].trim() || !ITEM.test(lines[n + 1] ?? "")) break;
  }
  const ordered = /\d/.test(mark);
  made.push(el(ordered ? "ol" : "ul", { start: ordered ? parseInt(mark, 10) : null }, items.map((item) => el("li", {}, item.length > 1 ? blocks(item) : inline(item[0])))));
  return n;
}

function table(lines, start, made) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const head = el("tr", {}, cells(lines[start]).map((cell) => el("th", { scope: "col" }, cell)));
  const rows = [];
  let n = start + 2;
  for (; n < lines.length && lines[n].includes("|"); n++) rows.push(el("tr", {}, cells(lines[n]).map((cell) => el("td", {}, cell))));
  made.push(el("div", { class: "wide-table" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
  return n;
}

function code(text, language) {
  const copy = el("button", { type: "button", class: "quiet copy", text: "Copy", "aria-label": "Copy this code" });
  copy.addEventListener("click", () => copied(copy, text));
  return el("div", { class: "code" }, el("p", { class: "code-head" }, el("span", { text: language || "code" }), copy), el("pre", { tabindex: 0 }, el("code", { text })));
}

export async function copied(button, text) {
  const was = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // browsers give the clipboard to https and to this machine only
  }
  setTimeout(() => (button.textContent = was), 1500);
}

function inline(text) {
  const made = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    made.push(...broken(text.slice(at, found.index)));
    const [whole, , ticked, strong, emphasised, label, link] = found;
    if (ticked !== undefined) made.push(el("code", { text: ticked.trim() || ticked }));
    else if (strong !== undefined) made.push(el("strong", {}, inline(strong)));
    else if (emphasised !== undefined) made.push(el("em", {}, inline(emphasised)));
    else made.push(el("a", { href: link, rel: "noopener noreferrer", target: "_blank", text: label }));
    at = found.index + whole.length;
  }
  return [...made, ...broken(text.slice(at))];
}

/** Its line breaks stay. */
const broken = (text) => text.split("\n").flatMap((line, n) => (n ? [el("br"), line] : [line])).filter((part) => part !== "");
