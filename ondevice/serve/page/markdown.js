// Markdown as elements. Text of a model reaches the page as text nodes alone, never as markup.
//
// Every scan is bounded or goes forward only, so that no text takes more than about linear time.

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]{0,30})/;
const HEADING = /^(#{1,6}) +(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ *:?-+:? *$/;
const LINK = /!?\[([^[\]\n]{0,500})\]\(([^()\s]{1,2000})\)/y;
const URL_TEXT = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const SPECIAL = /[\\`*_~[!h\n]/g;

// Shows `text` in `target`. Blocks that are as before keep their elements, so that a long reply grows cheaply.
export function render(target, text) {
  const blocks = split(text.split("\n"));
  const before = target.shownBlocks || [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same] === before[same]) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const block of blocks.slice(same)) target.append(element(block.split("\n"), 0));
  target.shownBlocks = blocks;
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
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || isRule(line) || ITEM.test(line)
    || QUOTE.test(line) || isTable(lines, at);
}

function isRule(line) {
  const text = line.replaceAll(" ", "");
  return text.length >= 3 && "-*_".includes(text[0]) && text === text[0].repeat(text.length);
}

function isTable(lines, at) {
  const next = lines[at + 1];
  return hasBar(lines[at]) && next !== undefined && hasBar(next)
    && cells(next).every((cell) => DIVIDER.test(cell)) && cells(next).length === cells(lines[at]).length;
}

function hasBar(line) {
  return line.includes("|");
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
}

function indent(line) {
  return line.length - line.trimStart().length;
}

function element(lines, depth) {
  const line = lines[0];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, fence[1], fence[2]);
  if (depth > MAX_DEPTH) return made("p", lines.join("\n"));
  const heading = HEADING.exec(line);
  // The page's own headings are the first two levels.
  if (heading) return inlined(made(`h${Math.min(6, heading[1].length + 2)}`), heading[2], 0);
  if (isRule(line)) return made("hr");
  if (ITEM.test(line)) return list(lines, depth);
  if (QUOTE.test(line)) return nested(made("blockquote"), lines.map((it) => it.replace(QUOTE, "")), depth);
  if (isTable(lines, 0)) return table(lines);
  return inlined(made("p"), lines.map((it) => it.trim()).join("\n"), 0);
}

function code(lines, fence, language) {
  const inner = lines.slice(1, lines.length > 1 && closes(lines.at(-1), fence) ? -1 : undefined);
  const text = inner.join("\n");
  const figure = made("figure");
  figure.className = "code";
  const bar = made("figcaption", language || "code");
  // Browsers have a clipboard only over https and on this machine.
  if (navigator.clipboard) bar.append(copier(text, language || "code"));
  const pre = made("pre");
  pre.tabIndex = 0;
  pre.append(made("code", text));
  figure.append(bar, pre);
  return figure;
}

function copier(text, what) {
  const copy = made("button", "Copy");
  copy.type = "button";
  copy.setAttribute("aria-label", `Copy this ${what}`);
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  return copy;
}

function list(lines, depth) {
  const [, spaces, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const found = made(ordered ? "ol" : "ul");
  if (ordered) found.start = parseInt(mark, 10);
  let item = [];
  let offset = 0;
  const finish = () => {
    if (!item.length) return;
    const shown = nested(made("li"), item, depth);
    // Items of one paragraph stand close together.
    if (shown.firstChild?.tagName === "P") shown.firstChild.replaceWith(...shown.firstChild.childNodes);
    found.append(shown);
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
  return found;
}

function table(lines) {
  const found = made("table");
  const head = made("thead");
  const body = made("tbody");
  head.append(row(lines[0], "th"));
  for (const line of lines.slice(2)) body.append(row(line, "td"));
  found.append(head, body);
  const scroller = made("div");
  scroller.className = "wide";
  scroller.tabIndex = 0;
  scroller.append(found);
  return scroller;
}

function row(line, tag) {
  const found = made("tr");
  for (const cell of cells(line)) found.append(inlined(made(tag), cell.trim(), 0));
  return found;
}

function nested(parent, lines, depth) {
  for (const block of split(lines)) parent.append(element(block.split("\n"), depth + 1));
  return parent;
}

// Appends the text with its emphasis, code and links.
function inlined(parent, text, depth) {
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
    const found = SPECIAL.exec(text);
    if (!found) break;
    at = found.index;
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
  if (sign === "\n") return [made("br"), at + 1];
  if (sign === "\\") {
    const next = text[at + 1] || "";
    return /[!-/:-@[-`{-~]/.test(next) ? [document.createTextNode(next), at + 2] : [null, at + 1];
  }
  if (sign === "[" || sign === "!") return linked(text, at);
  if (sign === "h") return bareUrl(text, at);
  const run = /^(`+|\*+|_+|~+)/.exec(text.slice(at, at + 200))[0];
  if (sign === "`") return inlineCode(text, at, run, unclosed);
  return emphasis(text, at, run, depth, unclosed);
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
  return [made("code", text.slice(from, end).trim()), end + run.length];
}

function emphasis(text, at, run, depth, unclosed) {
  const sign = run[0];
  const mark = run.slice(0, sign === "~" ? 2 : Math.min(run.length, 2));
  const from = at + mark.length;
  const skip = [null, at + run.length];
  const tag = { "*": "em", "**": "strong", _: "em", __: "strong", "~~": "del" }[mark];
  if (!tag || run.length > 3 || depth > MAX_DEPTH || unclosed.has(mark)) return skip;
  if (/\s/.test(text[from] || " ") || (sign === "_" && /\w/.test(text[at - 1] || ""))) return skip;
  let end = text.indexOf(mark, from + 1);
  while (end >= 0 && !isClosing(text, end, mark)) end = text.indexOf(mark, end + mark.length);
  if (end < 0) {
    unclosed.add(mark);
    return skip;
  }
  return [inlined(made(tag), text.slice(from, end), depth + 1), end + mark.length];
}

function isClosing(text, end, mark) {
  const after = text[end + mark.length] || "";
  if (/\s/.test(text[end - 1])) return false;
  if (mark.length === 1 && (after === mark || text[end - 1] === mark)) return false;
  return mark[0] !== "_" || !/\w/.test(after);
}

function linked(text, at) {
  LINK.lastIndex = at;
  const found = LINK.exec(text);
  if (!found) return [null, at + 1];
  const shown = link(found[2], found[1] || found[2]);
  return shown ? [shown, at + found[0].length] : [null, at + 1];
}

function bareUrl(text, at) {
  URL_TEXT.lastIndex = at;
  const found = URL_TEXT.exec(text);
  if (!found) return [null, at + 1];
  const url = found[0].replace(/[.,;:!?)*_~]{1,20}$/, "");
  const shown = link(url, url);
  return shown ? [shown, at + url.length] : [null, at + found[0].length];
}

// A link to another site, or null for what isn't one. Pictures are links too: the page loads nothing from others.
function link(address, text) {
  if (!/^(https?:\/\/|mailto:)/i.test(address) || !URL.canParse(address)) return null;
  const found = made("a", text);
  found.href = address;
  found.target = "_blank";
  found.rel = "noopener noreferrer nofollow";
  return found;
}

function made(tag, text = "") {
  const found = document.createElement(tag);
  if (text) found.textContent = text;
  return found;
}
