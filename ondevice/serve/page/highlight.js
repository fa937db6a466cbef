// Colours of code: one line at a time, with what stays open from line to line, so that a long block grows cheaply.

const MAX_LINE_CHARS = 2000;
const words = (text) => new Set(text.split(" "));

const C_LIKE =
  "break case catch class const continue default do else enum export extends false finally for if import in " +
  "interface let new null private protected public return static struct super switch this throw true try typeof var void while";
const FAMILIES = {
  c: {
    comment: "//",
    block: ["/*", "*/"],
    quotes: "\"'",
    keywords: words(
      `${C_LIKE} auto bool char double extern float goto ` +
        "include int long namespace nullptr operator short signed sizeof template typedef typename union unsigned using virtual " +
        "volatile override final abstract boolean byte implements instanceof package throws string object fun val when " +
        "func var type map chan go defer range select fallthrough nil fn mut pub impl trait use mod match loop move ref self crate " +
        "dyn where async await unsafe let guard protocol extension init def trait with yield lazy sealed record",
    ),
    preprocessor: true,
  },
  javascript: {
    comment: "//",
    block: ["/*", "*/"],
    quotes: "\"'",
    raw: ["`"],
    keywords: words(
      `${C_LIKE} async await debugger ` +
        "delete from function get instanceof of set undefined with yield as declare implements keyof namespace never readonly type " +
        "unknown any string number boolean satisfies abstract",
    ),
  },
  python: {
    comment: "#",
    quotes: "\"'",
    raw: ['"""', "'''"],
    keywords: words(
      "and as assert async await break class continue def del " +
        "elif else except False finally for from global if import in is lambda match case None nonlocal not or pass raise return True " +
        "try while with yield self",
    ),
  },
  shell: {
    comment: "#",
    quotes: "\"'",
    keywords: words(
      "case do done elif else esac export fi for function if in local read return set " +
        "shift source then unset until while echo cd exit sudo",
    ),
  },
  ruby: {
    comment: "#",
    quotes: "\"'",
    keywords: words(
      "alias and begin break case class def defined do else elsif end ensure false for " +
        "if in module next nil not or redo rescue retry return self super then true undef unless until when while yield require " +
        "attr_accessor puts function local repeat",
    ),
  },
  sql: {
    comment: "--",
    block: ["/*", "*/"],
    quotes: "'\"",
    anyCase: true,
    keywords: words(
      "add all alter and as asc between by case cast " +
        "check column constraint create cross default delete desc distinct drop else end exists false foreign from full group having " +
        "if in index inner insert into is join key left like limit not null offset on or order outer primary references right select " +
        "set table then true union unique update using values view when where with",
    ),
  },
  css: {
    block: ["/*", "*/"],
    quotes: "\"'",
    keywords: words("important inherit initial unset none auto flex grid block inline"),
  },
  json: { quotes: '"', keywords: words("true false null") },
  config: {
    comment: "#",
    quotes: "\"'",
    keywords: words("true false null yes no on off FROM RUN COPY CMD ENTRYPOINT ENV WORKDIR ARG EXPOSE"),
  },
  markup: { block: ["<!--", "-->"], quotes: "\"'", tags: true, keywords: words("") },
  diff: {
    lines: [
      [/^(\+\+\+|---|diff |index )/, "name"],
      [/^@@/, "keyword"],
      [/^\+/, "string"],
      [/^-/, "removed"],
    ],
  },
};
const NAMES = {
  c: "c cpp c++ cc h hpp csharp cs c# java go golang rust rs swift kotlin kt scala dart objc php arduino glsl hlsl cuda zig",
  javascript: "javascript js jsx mjs typescript ts tsx",
  python: "python py python3 pyi",
  shell: "bash sh shell zsh console fish powershell ps1 make makefile",
  ruby: "ruby rb lua elixir ex perl pl r julia jl",
  sql: "sql mysql postgresql postgres sqlite plsql",
  css: "css scss less sass",
  json: "json jsonc json5 jsonl",
  config: "yaml yml toml ini conf dockerfile docker env properties cfg cmake nginx",
  markup: "html xml svg vue xhtml htm mathml jsp astro",
  diff: "diff patch",
};
const FAMILY_OF = new Map(
  Object.entries(NAMES).flatMap(([family, names]) => names.split(" ").map((name) => [name, FAMILIES[family]])),
);
const PARTS = /\d[\w.]*|[\p{L}_$@][\p{L}\p{N}_$-]*|\s+|[^\s]/uy;

export const familyOf = (language) => FAMILY_OF.get(language.toLowerCase());

// The parts of a line as [text, colour], and the mark that ends what is still open behind it ("" for nothing).
export function highlight(line, family, open) {
  if (!family || line.length > MAX_LINE_CHARS) return [[[line, ""]], open];
  if (family.lines) return [[[line, family.lines.find(([pattern]) => pattern.test(line))?.[1] || ""]], ""];
  const parts = [];
  let at = 0;
  let end = open;
  const take = (length, colour) => {
    parts.push([line.slice(at, at + length), colour]);
    at += length;
  };
  while (at < line.length) {
    if (end) {
      const close = line.indexOf(end, at);
      const colour = family.block?.[1] === end ? "comment" : "string";
      take(close < 0 ? line.length - at : close + end.length - at, colour);
      if (close < 0) break;
      end = "";
      continue;
    }
    if (
      family.comment &&
      line.startsWith(family.comment, at) &&
      (at === 0 || family.comment !== "#" || /\s/.test(line[at - 1]))
    ) {
      take(line.length - at, "comment");
    } else if (family.block && line.startsWith(family.block[0], at)) {
      end = family.block[1];
      take(family.block[0].length, "comment");
    } else if (family.raw?.some((mark) => line.startsWith(mark, at))) {
      end = family.raw.find((mark) => line.startsWith(mark, at));
      take(end.length, "string");
    } else if (family.quotes?.includes(line[at])) {
      take(stringLength(line, at), "string");
    } else {
      PARTS.lastIndex = at;
      const text = PARTS.exec(line)?.[0] || line[at];
      take(text.length, colourOf(text, line, at, family));
    }
  }
  return [parts, end];
}

// The length of the string that begins at `at`. One that isn't closed is its quote alone.
function stringLength(line, at) {
  for (let end = at + 1; end < line.length; end += 1) {
    if (line[end] === "\\") end += 1;
    else if (line[end] === line[at]) return end + 1 - at;
  }
  return 1;
}

function colourOf(text, line, at, family) {
  if (/^\d/.test(text)) return "number";
  if (family.tags) {
    if (/[</]/.test(line[at - 1] || "") && /^\p{L}/u.test(text)) return "keyword";
    return line[at + text.length] === "=" ? "name" : "";
  }
  if (family.preprocessor && text === "#") return "keyword";
  if (!/^[\p{L}_$@]/u.test(text)) return "";
  if (family.keywords.has(family.anyCase ? text.toLowerCase() : text)) return "keyword";
  if (line[at + text.length] === "(") return "name";
  return /^\p{Lu}\p{L}*\p{Ll}/u.test(text) ? "type" : "";
}
