// Markdown as elements: headings, lists, tables, quotes, code, emphasis and links. Markup in it stays text.
//
// The time is proportional to the text, whatever a model writes; nesting beyond DEEPEST stays text.

import { copyButton } from "./copy.js";
import { inline } from "./inline.js";
import { element } from "./text.js";

const DEEPEST = 6, MOST_COLUMNS = 64;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)/, HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/, QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^[ \t]*([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/, TAB = 4;  // columns

// A text that grows: blocks that are complete stay as they are, and only the last one is made again.
export class MarkdownView {
  #text = "";
  #done = 0;  // characters of complete blocks
  #last = [];  // the elements after those

  constructor() {
    this.node = element("div", "markdown");
  }

  show(text) {
    if (!text.startsWith(this.#text)) {
      this.node.replaceChildren();
      [this.#done, this.#last] = [0, []];
    }
    this.#text = text;
    // A line that is still being written may turn into the begin of another block, so it completes none.
    const lines = text.slice(this.#done).split("\n"), blocks = blocksOf(lines, 0), complete = lines.length - 1;
    const number = blocks.findLastIndex(block => block.begin < complete);
    const old = this.#last;
    this.#last = [];
    for (const [at, block] of blocks.entries()) {
      const reused = at === 0 && block.kind === "code" && old[0]?.className === "code" ? old.shift() : null;
      const made = reused ?? nodeOf(block, 0);
      if (reused) {
        reused.querySelector("code").textContent = block.lines.join("\n");
        reused.querySelector("span").textContent = block.language || "code";
      }
      if (at >= number) this.#last.push(made);
      if (!reused) this.node.insertBefore(made, old[0] ?? null);
    }
    old.forEach(one => one.remove());
    if (number > 0) this.#done += lines.slice(0, blocks[number].begin).reduce((sum, line) => sum + line.length + 1, 0);
  }
}

// The blocks of some lines, each with the line where it begins.
function blocksOf(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = blockAt(lines, at, depth);
    block.begin = at;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at].trimEnd(), fence = FENCE.exec(line), heading = HEADING.exec(line);
  if (fence) return codeAt(lines, at, fence);
  if (heading) return { kind: "heading", level: heading[1].length, text: line.slice(heading[0].length), end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) return quoteAt(lines, at);
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, at);
  if (isTable(lines, at)) return tableAt(lines, at);
  return paragraphAt(lines, at, depth);
}

function codeAt(lines, at, [, marks, language]) {
  const inside = [];
  for (at++; at < lines.length; at++) {
    const end = FENCE.exec(lines[at]);
    if (end && end[1].startsWith(marks) && lines[at].trim() === end[1]) return { kind: "code", language, lines: inside, end: at + 1 };
    inside.push(lines[at]);
  }
  return { kind: "code", language, lines: inside, end: at };
}

function quoteAt(lines, at) {
  const inside = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at++) inside.push(lines[at].replace(QUOTE, ""));
  return { kind: "quote", lines: inside, end: at };
}

function listAt(lines, at) {
  const mark = ITEM.exec(lines[at])[1], isOrdered = mark.length > 1, inside = columnsOf(lines[at]) + 2, items = [];
  const isItem = line => {
    const found = ITEM.exec(line);
    return found && columnsOf(line) < inside && found[1].length > 1 === isOrdered && !RULE.test(line) ? found : null;
  };
  while (at < lines.length) {
    const line = lines[at], item = isItem(line);
    if (item) {
      items.push([line.slice(item[0].length)]);
    } else if (!line.trim()) {
      let next = at;
      while (next < lines.length && !lines[next].trim()) next++;
      if (next === lines.length || !(columnsOf(lines[next]) >= inside || isItem(lines[next]))) break;
      for (; at < next; at++) items.at(-1).push("");
      continue;
    } else if (columnsOf(line) >= inside) {
      items.at(-1).push(withoutIndent(line, isOrdered ? inside + mark.length - 1 : inside));
    } else if (lines[at - 1].trim() && !beginsBlock(lines, at)) {
      items.at(-1).push(line.trimStart());
    } else {
      break;
    }
    at++;
  }
  return { kind: "list", isOrdered, first: parseInt(mark, 10), items, end: at };
}

// The columns of white space before a line's text.
function columnsOf(line) {
  let columns = 0;
  for (let at = 0; line[at] === " " || line[at] === "\t"; at++) columns += line[at] === "\t" ? TAB : 1;
  return columns;
}

function withoutIndent(line, most) {
  let at = 0;
  for (let columns = 0; columns < most && (line[at] === " " || line[at] === "\t"); at++) columns += line[at] === "\t" ? TAB : 1;
  return line.slice(at);
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-") || !lines[at + 1].includes("|")) return false;
  return cellsOf(lines[at + 1]).every(cell => /^:?-+:?$/.test(cell));
}

function tableAt(lines, at) {
  const sides = cellsOf(lines[at + 1]).map(cell => cell.endsWith(":") ? cell.startsWith(":") ? "middle" : "number" : "");
  const head = cellsOf(lines[at]), rows = [];
  for (at += 2; at < lines.length && lines[at].includes("|"); at++) rows.push(cellsOf(lines[at]));
  return { kind: "table", sides, head, rows, end: at };
}

// The cells of a row; a pipe after a backslash is none between cells.
function cellsOf(line) {
  const text = line.trim();
  const inside = text.slice(text.startsWith("|") ? 1 : 0, text.endsWith("|") && !text.endsWith("\\|") && text.length > 1 ? -1 : undefined);
  return inside.split(/(?<!\\)\|/, MOST_COLUMNS).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function beginsBlock(lines, at) {
  const line = lines[at].trimEnd();
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, at);
}

function paragraphAt(lines, at, depth) {
  const inside = [lines[at]];
  for (at++; at < lines.length && lines[at].trim(); at++) {
    if (depth < DEEPEST && beginsBlock(lines, at)) break;
    inside.push(lines[at]);
  }
  return { kind: "paragraph", text: inside.map(line => line.trim()).join("\n"), end: at };
}

// --- elements ---

function nodeOf(block, depth) {
  switch (block.kind) {
    case "code": return codeNode(block);
    case "heading": return filled(element("h4", `level-${block.level}`), inline(block.text.replace(/\s#+$/, "")));
    case "rule": return element("hr");
    case "quote": return filled(element("blockquote"), nodesOf(block.lines, depth + 1));
    case "list": return listNode(block, depth);
    case "table": return tableNode(block);
    default: return filled(element("p"), inline(block.text));
  }
}

const nodesOf = (lines, depth) => blocksOf(lines, depth).map(block => nodeOf(block, depth));

function filled(node, children) {
  for (const child of children) node.append(child);  // as arguments, too many would overflow the stack
  return node;
}

function codeNode({ language, lines }) {
  const code = element("code", "", lines.join("\n")), text = element("pre", "", code);
  text.tabIndex = 0;  // it scrolls
  const head = element("div", "code-head", element("span", "", language || "code"), copyButton(() => code.textContent, "Copy this code"));
  return element("div", "code", head, text);
}

function listNode({ isOrdered, first, items }, depth) {
  const list = element(isOrdered ? "ol" : "ul");
  if (isOrdered && first !== 1) list.start = first;
  for (const lines of items) {
    const task = /^\[([ xX])\] /.exec(lines[0]);
    if (task) lines[0] = `${task[1] === " " ? "☐" : "☑"} ${lines[0].slice(4)}`;
    const [block, ...others] = blocksOf(lines, depth + 1), item = element("li");
    // The first paragraph of an item stands beside its mark, without the space around others.
    if (block?.kind === "paragraph") filled(item, inline(block.text));
    else if (block) item.append(nodeOf(block, depth + 1));
    list.append(filled(item, others.map(one => nodeOf(one, depth + 1))));
  }
  return list;
}

function tableNode({ sides, head, rows }) {
  const cells = (texts, tag) => sides.map((side, at) => filled(element(tag, side), inline(texts[at] ?? "")));
  const top = filled(element("tr"), cells(head, "th")), body = element("tbody");
  for (const row of rows) body.append(filled(element("tr"), cells(row, "td")));
  const around = element("div", "scroll", element("table", "", element("thead", "", top), body));
  around.tabIndex = 0;
  return around;
}
