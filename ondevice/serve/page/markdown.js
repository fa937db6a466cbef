// The blocks of Markdown as elements. Text of a model reaches the page as text nodes alone, never as markup.
//
// Every scan is bounded or goes forward only, so that no text takes more than about linear time.

import { codeBlock, setCode } from "./code.js";
import { make } from "./elements.js";
import { appendInline } from "./inline.js";
import { mathematics } from "./mathematics.js";
import { closed } from "./unfinished.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]{0,30})/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const ITEM = /^( *)([-*+•]|\d{1,9}[.)])( +|$)/;
const TASK = /^\[([ xX])\] /;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ *:?-+:? *$/;
const FORMULA_ENDS = { $$: "$$", "\\[": "\\]" };

// Shows `text` in `target`. Blocks that are as before keep their elements, so that a long reply grows cheaply.
// unfinished: whether more is to come, so that what the last block leaves open is drawn closed.
export function render(target, text, unfinished = false) {
  const blocks = split(text.split("\n"));
  if (unfinished && blocks.length) blocks[blocks.length - 1] = closed(blocks.at(-1));
  const before = target.shownBlocks || [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same] === before[same]) same += 1;
  if (
    same === blocks.length - 1 &&
    before.length === blocks.length &&
    growsCode(target.lastChild, before.at(-1), blocks.at(-1))
  ) {
    setCode(target.lastChild, fencedText(blocks.at(-1).split("\n")).text);
  } else {
    while (target.childNodes.length > same) target.lastChild.remove();
    for (const block of blocks.slice(same)) target.append(element(block.split("\n"), 0));
  }
  target.shownBlocks = blocks;
}

// Whether a block is the code that is shown already, with more lines.
function growsCode(shown, before, block) {
  const head = (it) => it.slice(0, it.indexOf("\n") + 1 || it.length);
  return Boolean(shown?.codeBlock) && FENCE.test(block) && head(before) === head(block);
}

// The sources of the blocks of `lines`.
function split(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const end = blockEnd(lines, at);
    if (lines[at].trim()) blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

function blockEnd(lines, at) {
  const line = lines[at];
  if (!line.trim()) return at + 1;
  const fence = FENCE.exec(line);
  if (fence) return fenceEnd(lines, at, fence[1]);
  if (formulaMark(line)) return formulaEnd(lines, at);
  if (HEADING.test(line) || isRule(line)) return at + 1;
  if (ITEM.test(line)) return listEnd(lines, at);
  const inside = QUOTE.test(line) ? (it) => QUOTE.test(it) : isTable(lines, at) ? hasBar : null;
  let end = at + 1;
  if (inside) {
    while (end < lines.length && inside(lines[end])) end += 1;
    return end;
  }
  while (end < lines.length && !beginsBlock(lines, end)) end += 1;
  return end;
}

function fenceEnd(lines, at, fence) {
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  return Math.min(end + 1, lines.length);
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

// The mark of a formula that has lines of its own; "" if the line begins none.
function formulaMark(line) {
  const text = line.trim();
  const mark = Object.keys(FORMULA_ENDS).find((it) => text.startsWith(it));
  if (!mark) return "";
  // Text behind a formula's end makes it a part of a paragraph.
  const end = text.indexOf(FORMULA_ENDS[mark], mark.length);
  return end < 0 || end + FORMULA_ENDS[mark].length === text.length ? mark : "";
}

function formulaEnd(lines, at) {
  const close = FORMULA_ENDS[formulaMark(lines[at])];
  if (lines[at].trim().indexOf(close, 2) > 0) return at + 1;
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !lines[end].includes(close)) end += 1;
  return Math.min(end + 1, lines.length);
}

function listEnd(lines, at) {
  const base = ITEM.exec(lines[at])[1].length;
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1] || "";
      if (!next.trim() || (indent(next) <= base && !ITEM.test(next))) break;
    } else if (indent(line) <= base && !ITEM.test(line) && beginsBlock(lines, end)) break;
    else if (indent(line) < base) break;
    end += 1;
  }
  return end;
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return (
    !line.trim() ||
    FENCE.test(line) ||
    HEADING.test(line) ||
    isRule(line) ||
    ITEM.test(line) ||
    QUOTE.test(line) ||
    isTable(lines, at) ||
    formulaMark(line) !== ""
  );
}

function isRule(line) {
  const text = line.replaceAll(" ", "");
  return text.length >= 3 && "-*_".includes(text[0]) && text === text[0].repeat(text.length);
}

function isTable(lines, at) {
  const next = lines[at + 1];
  return (
    hasBar(lines[at]) &&
    next !== undefined &&
    hasBar(next) &&
    cells(next).every((cell) => DIVIDER.test(cell)) &&
    cells(next).length === cells(lines[at]).length
  );
}

function hasBar(line) {
  return line.includes("|");
}

// The cells of a row. A bar in code, or behind a backslash, belongs to its cell.
function cells(line) {
  const made = [];
  let cell = "";
  let inCode = false;
  const text = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "`") inCode = !inCode && text.includes("`", at + 1);
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|" && !inCode) {
      made.push(cell);
      cell = "";
    } else cell += text[at];
  }
  return [...made, cell];
}

function indent(line) {
  return line.length - line.trimStart().length;
}

function element(lines, depth) {
  const line = lines[0];
  if (FENCE.test(line)) return fenced(lines);
  if (depth > MAX_DEPTH) return make("p", { dir: "auto", textContent: lines.join("\n") });
  if (formulaMark(line)) return formula(lines);
  const heading = HEADING.exec(line);
  // Of one level behind the message's own, as replies leave levels out.
  if (heading)
    return directed(
      inlined("h4", heading[2].replace(/ {1,9}#{1,9} {0,9}$/, ""), { className: `level-${heading[1].length}` }),
    );
  if (isRule(line)) return make("hr");
  if (ITEM.test(line)) return list(lines, depth);
  if (QUOTE.test(line))
    return nested(
      make("blockquote"),
      lines.map((it) => it.replace(QUOTE, "")),
      depth,
    );
  if (isTable(lines, 0)) return table(lines);
  return directed(inlined("p", lines.map((it) => it.trim()).join("\n")));
}

function inlined(tag, text, properties = {}) {
  return appendInline(make(tag, properties), text);
}

// Lets an element that is filled have the direction of its text. Before, browsers would look for it at each child.
function directed(element) {
  element.dir = "auto";
  return element;
}

function fencedText(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const inner = lines.slice(1, lines.length > 1 && closes(lines.at(-1), fence) ? -1 : undefined);
  return { text: inner.join("\n"), language };
}

function fenced(lines) {
  const { text, language } = fencedText(lines);
  return language === "math" ? scroller(mathematics(text, true), "Formula") : codeBlock(text, language);
}

function formula(lines) {
  const text = lines.join("\n").trim();
  const mark = formulaMark(lines[0]);
  const close = FORMULA_ENDS[mark];
  const end = text.indexOf(close, mark.length);
  return scroller(mathematics(text.slice(mark.length, end < 0 ? undefined : end), true), "Formula");
}

// What is wider than the page scrolls by itself, by keyboard too.
function scroller(content, name) {
  return make("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": name }, content);
}

function list(lines, depth) {
  const [, spaces, mark] = ITEM.exec(lines[0]);
  const isOrdered = /\d/.test(mark);
  const made = make(isOrdered ? "ol" : "ul");
  if (isOrdered) made.start = parseInt(mark, 10);
  let item = [];
  let offset = 0;
  const finish = () => {
    if (!item.length) return;
    const task = TASK.exec(item[0]);
    if (task) item[0] = `${task[1] === " " ? "☐" : "☑"} ${item[0].slice(4)}`;
    const shown = nested(make("li", { className: task ? "task" : "" }), item, depth);
    // Items of one paragraph stand close together.
    if (shown.firstChild?.tagName === "P") shown.firstChild.replaceWith(...shown.firstChild.childNodes);
    made.append(shown);
  };
  for (const line of lines) {
    const begun = ITEM.exec(line);
    if (begun && begun[1].length <= spaces.length + 1) {
      finish();
      offset = begun[0].length;
      item = [line.slice(offset)];
    } else item.push(line.slice(Math.min(indent(line), offset)));
  }
  finish();
  return directed(made);
}

function table(lines) {
  const sides = cells(lines[1])
    .map((it) => it.trim())
    .map((it) => (it.endsWith(":") ? (it.startsWith(":") ? "middle" : "end") : ""));
  const head = make("thead", {}, row(lines[0], "th", sides));
  const body = make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td", sides)));
  return scroller(directed(make("table", {}, head, body)), "Table");
}

function row(line, tag, sides) {
  const shown = cells(line).slice(0, sides.length);
  return make("tr", {}, ...shown.map((cell, at) => inlined(tag, cell.trim(), { className: sides[at] })));
}

function nested(parent, lines, depth) {
  for (const block of split(lines)) parent.append(element(block.split("\n"), depth + 1));
  return parent;
}
