// What stands inside a line of Markdown: emphasis, code, links and mathematics.
//
// Every scan is bounded or goes forward only, so that no text takes more than about linear time.

import { make } from "./elements.js";
import { mathematics } from "./mathematics.js";

const MAX_DEPTH = 8;
const MAX_MATHEMATICS_CHARS = 2000;
const LINK =
  /!?\[([^[\]\n]{0,500})\]\(<?([^()\s<>]{1,2000}(?:\([^()\s<>]{0,200}\)[^()\s<>]{0,200})?)>?(?: "[^"\n]{0,300}")?\)/y;
const URL_TEXT = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const LINE_BREAK = /<br ?\/?>/iy;
const SPECIAL = /[\\`*_~[!h\n$<]/g;

// Appends a text with its emphasis, code, links and formulas.
export function appendInline(parent, text, depth = 0) {
  const unclosed = new Set();
  let at = 0;
  let plain = 0;
  const put = (node, end) => {
    if (at > plain) parent.append(text.slice(plain, at));
    if (node) parent.append(node);
    at = plain = end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const match = SPECIAL.exec(text);
    if (!match) break;
    at = match.index;
    const [node, end] = special(text, at, depth, unclosed);
    if (node) put(node, end);
    else at = end;
  }
  at = text.length;
  put(null, at);
  return parent;
}

// The element that begins at `at`, and where it ends; without an element, how far there is none.
function special(text, at, depth, unclosed) {
  const sign = text[at];
  if (sign === "\n") return [make("br"), at + 1];
  if (sign === "\\") return escaped(text, at, unclosed);
  if (sign === "$") return dollars(text, at, unclosed);
  if (sign === "<") return lineBreak(text, at);
  if (sign === "[" || sign === "!") return linked(text, at);
  if (sign === "h") return bareUrl(text, at);
  const run = /^(`+|\*+|_+|~+)/.exec(text.slice(at, at + 200))[0];
  if (sign === "`") return inlineCode(text, at, run, unclosed);
  return emphasis(text, at, run, depth, unclosed);
}

function escaped(text, at, unclosed) {
  const next = text[at + 1] || "";
  if (next === "(" || next === "[") {
    const formula = between(text, at, next === "(" ? "\\(" : "\\[", next === "(" ? "\\)" : "\\]", unclosed);
    if (formula) return formula;
  }
  return /[!-/:-@[-`{-~]/.test(next) ? [document.createTextNode(next), at + 2] : [null, at + 1];
}

// A formula between dollars. A price isn't one: a space follows its sign, or a digit its end.
function dollars(text, at, unclosed) {
  if (text[at + 1] === "$") return between(text, at, "$$", "$$", unclosed) || [null, at + 2];
  if (/\s/.test(text[at + 1] || " ")) return [null, at + 1];
  const end = unclosed.has("$") ? -1 : text.indexOf("$", at + 1);
  if (end < 0) {
    unclosed.add("$");
    return [null, at + 1];
  }
  const inner = text.slice(at + 1, end);
  if (
    /\s$/.test(inner) ||
    /\d/.test(text[end + 1] || "") ||
    inner.length > MAX_MATHEMATICS_CHARS ||
    inner.includes("\n")
  )
    return [null, at + 1];
  return [mathematics(inner, false), end + 1];
}

function between(text, at, open, close, unclosed) {
  const end = unclosed.has(close) ? -1 : text.indexOf(close, at + open.length);
  if (end < 0) {
    unclosed.add(close);
    return null;
  }
  const inner = text.slice(at + open.length, end);
  if (inner.length > MAX_MATHEMATICS_CHARS) return null;
  return [mathematics(inner, open === "$$" || open === "\\["), end + close.length];
}

function lineBreak(text, at) {
  LINE_BREAK.lastIndex = at;
  const match = LINE_BREAK.exec(text);
  return match ? [make("br"), at + match[0].length] : [null, at + 1];
}

function inlineCode(text, at, run, unclosed) {
  const from = at + run.length;
  let end = unclosed.has(run) ? -1 : text.indexOf(run, from);
  while (end >= 0 && text[end + run.length] === "`") {
    while (text[end] === "`") end += 1;
    end = text.indexOf(run, end);
  }
  if (end < 0) {
    unclosed.add(run);
    return [null, from];
  }
  return [make("code", { textContent: text.slice(from, end).trim() }), end + run.length];
}

function emphasis(text, at, run, depth, unclosed) {
  const sign = run[0];
  const mark = sign === "~" ? run.slice(0, 2) : run;
  const from = at + mark.length;
  const skip = [null, at + run.length];
  const tag = { "*": "em", "**": "strong", "***": "strong", _: "em", __: "strong", ___: "strong", "~~": "del" }[
    mark
  ];
  if (!tag || run.length > 3 || depth > MAX_DEPTH || unclosed.has(mark)) return skip;
  if (/\s/.test(text[from] || " ") || (sign === "_" && /\w/.test(text[at - 1] || ""))) return skip;
  let end = text.indexOf(mark, from + 1);
  while (end >= 0 && !isClosing(text, end, mark)) end = text.indexOf(mark, end + mark.length);
  if (end < 0) {
    unclosed.add(mark);
    return skip;
  }
  const inner = mark.length === 3 ? make("em") : make(tag);
  appendInline(inner, text.slice(from, end), depth + 1);
  return [mark.length === 3 ? make(tag, {}, inner) : inner, end + mark.length];
}

function isClosing(text, end, mark) {
  const after = text[end + mark.length] || "";
  if (/\s/.test(text[end - 1])) return false;
  if (mark.length === 1 && (after === mark || text[end - 1] === mark)) return false;
  return mark[0] !== "_" || !/\w/.test(after);
}

function linked(text, at) {
  LINK.lastIndex = at;
  const match = LINK.exec(text);
  if (!match) return [null, at + 1];
  const shown = link(match[2], match[1] || match[2]);
  return shown ? [shown, at + match[0].length] : [null, at + 1];
}

function bareUrl(text, at) {
  URL_TEXT.lastIndex = at;
  const match = URL_TEXT.exec(text);
  if (!match) return [null, at + 1];
  const url = match[0].replace(/[.,;:!?)*_~]{1,20}$/, "");
  const shown = link(url, url);
  return shown ? [shown, at + url.length] : [null, at + match[0].length];
}

// A link to another site, or null for what isn't one. Pictures are links too: the page loads nothing from others.
function link(address, text) {
  if (!/^(https?:\/\/|mailto:)/i.test(address) || !URL.canParse(address)) return null;
  return make("a", { textContent: text, href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
}
