// Closes what the last block of a reply leaves open while it is written, so that marks don't appear and vanish.

const OPEN_LINK = /!?\[([^[\]\n]{0,500})\]\([^()\s]{0,2000}$/;
const PARTIAL_MARK = /(\*{1,3}|_{1,2}|~{1,2}|`{1,2}|\[|!\[)$/;
const LEANING = /(^|[\s(])\*(?=\S)[^*]*$/;
const TABLE_DIVIDER = /^[|\s:-]*$/;

export function closed(block) {
  const lines = block.split("\n");
  if (lines[0].trim().startsWith("|") && lines.length <= 2 && TABLE_DIVIDER.test(lines[1] || ""))
    return table(lines[0]);
  if (/^ {0,3}(`{3,}|~{3,}|\$\$|\\\[)/.test(block)) return block;
  const last = lines.at(-1);
  return block.slice(0, block.length - last.length) + closedLine(last);
}

function closedLine(line) {
  const text = line.replace(OPEN_LINK, "$1").replace(PARTIAL_MARK, "");
  if (odd(text, "`")) return `${text}\``;
  const bare = text.replace(/`[^`]*`/g, "");
  const mark = ["**", "~~"].find((it) => odd(bare, it));
  if (!mark) return LEANING.test(bare.replaceAll("**", "")) ? `${text.trimEnd()}*` : text;
  // A mark with nothing behind it yet isn't shown.
  const at = text.lastIndexOf(mark);
  const rest = text.slice(at + mark.length);
  return rest.trim() ? `${text.trimEnd()}${mark}` : text.slice(0, at);
}

const odd = (text, mark) => text.split(mark).length % 2 === 0;

// The head of a table whose divider hasn't come yet.
function table(head) {
  const row = head.trim().replace(/\|?$/, "|");
  const count = row.split(/(?<!\\)\|/).length - 2;
  return count < 1 ? "" : `${row}\n|${"---|".repeat(count)}`;
}
