// Blocks of code: a bar with the language and a button that copies, and lines in colours.

import { button, flash, make } from "./elements.js";
import { familyOf, highlight } from "./highlight.js";

export function codeBlock(text, language) {
  const pre = make("pre", {
    tabIndex: 0,
    dir: "ltr",
    role: "group",
    "aria-label": `Code, ${language || "no language"}`,
  });
  const figure = make(
    "figure",
    { className: "code" },
    make("figcaption", { textContent: language || "code" }),
    pre,
  );
  const block = { pre, lines: [], states: [""], family: familyOf(language), text: "" };
  figure.codeBlock = block;
  // Browsers have a clipboard only over https and on this machine.
  if (navigator.clipboard)
    figure.firstChild.append(copyButton(() => block.text, `Copy this ${language || "code"}`));
  pre.append(make("code"));
  setCode(figure, text);
  return figure;
}

// Shows another text in a block. Lines that are as before keep their elements.
export function setCode(figure, text) {
  const block = figure.codeBlock;
  const code = block.pre.firstChild;
  const lines = text.split("\n");
  let same = 0;
  while (same < lines.length && same < block.lines.length && lines[same] === block.lines[same]) same += 1;
  while (code.childNodes.length > same) code.lastChild.remove();
  block.states.length = same + 1;
  for (let at = same; at < lines.length; at += 1) {
    const [parts, open] = highlight(lines[at], block.family, block.states[at]);
    const ends = at + 1 < lines.length ? "\n" : "";
    code.append(make("span", {}, ...parts.map(coloured), ends));
    block.states.push(open);
  }
  // The last line has no end yet: it is drawn anew with the next text.
  block.lines = lines.slice(0, -1);
  block.text = text;
}

function coloured([text, colour]) {
  return colour ? make("span", { className: `code-${colour}`, textContent: text }) : text;
}

export function copyButton(text, label, properties = {}) {
  const copy = button(
    "Copy",
    async () => {
      await navigator.clipboard.writeText(text());
      flash(copy, "Copied");
    },
    { "aria-label": label, ...properties },
  );
  return copy;
}
