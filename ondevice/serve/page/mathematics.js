// Formulas in TeX as MathML, which browsers draw and screen readers speak. What isn't known stands as text.

import { DELIMITERS, FUNCTIONS, IDENTIFIERS, LARGE_OPERATORS, OPERATORS, SPACES } from "./mathematics_symbols.js";

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const MAX_CHARS = 4000;
const MAX_DEPTH = 40;
const TOKEN = /\\[a-zA-Z]{1,40}\*?|\\[^]|\d+(?:\.\d+)?|\s+|[^]/uy;
const LETTERS = {
  mathbb: {
    A: 0x1d538,
    a: 0x1d552,
    0: 0x1d7d8,
    except: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" },
  },
  mathcal: {
    A: 0x1d49c,
    a: 0x1d4b6,
    except: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  },
  mathbf: { A: 0x1d400, a: 0x1d41a, 0: 0x1d7ce, except: {} },
  mathfrak: { A: 0x1d504, a: 0x1d51e, except: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" } },
};
const ALPHABETS = {
  mathbb: "mathbb",
  mathcal: "mathcal",
  mathscr: "mathcal",
  mathbf: "mathbf",
  boldsymbol: "mathbf",
  bm: "mathbf",
  mathfrak: "mathfrak",
};
const ACCENTS = {
  hat: "^",
  widehat: "^",
  bar: "¯",
  overline: "¯",
  tilde: "~",
  widetilde: "~",
  vec: "→",
  dot: "˙",
  ddot: "¨",
  overrightarrow: "→",
  overbrace: "⏞",
  underline: "_",
  underbrace: "⏟",
};
const TEXTS = new Set([
  "text",
  "textbf",
  "textit",
  "textrm",
  "mbox",
  "mathrm",
  "mathit",
  "mathsf",
  "mathtt",
  "operatorname",
  "operatorname*",
]);
const IGNORED = new Set([
  "displaystyle",
  "textstyle",
  "limits",
  "nolimits",
  "nonumber",
  "notag",
  "hline",
  "label",
  "tag",
]);
const SIZES = new Set([
  "big",
  "Big",
  "bigg",
  "Bigg",
  "bigl",
  "bigr",
  "Bigl",
  "Bigr",
  "biggl",
  "biggr",
  "Biggl",
  "Biggr",
  "middle",
]);
const FENCES = {
  matrix: ["", ""],
  pmatrix: ["(", ")"],
  bmatrix: ["[", "]"],
  vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"],
  Bmatrix: ["{", "}"],
  smallmatrix: ["", ""],
  cases: ["{", ""],
  array: ["", ""],
};

function element(tag, children = [], attributes = {}) {
  const made = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const leaf = (tag, text, attributes) => element(tag, [text], attributes);
const row = (children) => (children.length === 1 ? children[0] : element("mrow", children));

// The formula that `tex` is. display: whether it stands on a line of its own.
export function mathematics(tex, display) {
  const attributes = display ? { display: "block" } : {};
  const text = tex.trim();
  if (text.length > MAX_CHARS) return element("math", [leaf("mtext", text)], attributes);
  const parser = new Parser(text, display);
  return element(
    "math",
    [
      element(
        "mrow",
        parser.rows(() => false),
      ),
    ],
    attributes,
  );
}

class Parser {
  constructor(text, display) {
    this.display = display;
    this.depth = 0;
    this.at = 0;
    this.tokens = [];
    TOKEN.lastIndex = 0;
    for (let match = TOKEN.exec(text); match; match = TOKEN.exec(text)) this.tokens.push(match[0]);
  }

  get next() {
    return this.tokens[this.at];
  }

  skipSpaces() {
    while (this.next && !this.next.trim()) this.at += 1;
  }

  // What stands before a token for which `ends` is true, or the formula's end. Lines are drawn as a table's.
  rows(ends) {
    const lines = this.table(ends);
    const isPlain = lines.length === 1 && lines[0].length === 1;
    return isPlain ? lines[0][0] : [this.asTable(lines, true)];
  }

  // Rows of cells of elements.
  table(ends) {
    const lines = [[[]]];
    while (this.at < this.tokens.length && !ends(this.next)) {
      if (this.next === "\\\\") {
        this.at += 1;
        lines.push([[]]);
      } else if (this.next === "&") {
        this.at += 1;
        lines.at(-1).push([]);
      } else
        lines
          .at(-1)
          .at(-1)
          .push(...this.scripted());
    }
    if (lines.length > 1 && lines.at(-1).every((cell) => !cell.length)) lines.pop();
    return lines;
  }

  asTable(lines, isAligned) {
    const side = (at) => (isAligned ? { class: at % 2 ? "start" : "end" } : {});
    return element(
      "mtable",
      lines.map((cells) =>
        element(
          "mtr",
          cells.map((cell, at) => element("mtd", cell, side(at))),
        ),
      ),
    );
  }

  // An element with what stands above and below it. Nothing where a token makes none.
  scripted() {
    const base = this.atom();
    let below = null;
    let above = null;
    for (;;) {
      this.skipSpaces();
      if (this.next === "_" && !below) {
        this.at += 1;
        below = this.argument();
      } else if (this.next === "^" && !above) {
        this.at += 1;
        above = this.argument();
      } else if (this.next === "'") {
        let primes = "";
        while (this.next === "'") {
          primes += "′";
          this.at += 1;
        }
        above = above ? row([leaf("mo", primes), above]) : leaf("mo", primes);
      } else break;
    }
    if (!below && !above) return base ? [base] : [];
    return [withScripts(base || element("mrow"), below, above, this.display)];
  }

  // What a command applies to: a group, or one element.
  argument() {
    this.skipSpaces();
    if (this.next === undefined) return element("mrow");
    return this.atom() || element("mrow");
  }

  // The text of a group as it is written.
  groupText() {
    this.skipSpaces();
    if (this.next !== "{") return this.tokens[this.at++] || "";
    let depth = 0;
    let text = "";
    while (this.at < this.tokens.length) {
      const token = this.tokens[this.at++];
      if (token === "{") depth += 1;
      if (token === "}") depth -= 1;
      if (!depth) break;
      if (depth > 1 || token !== "{") text += token;
    }
    return text;
  }

  atom() {
    if (this.depth > MAX_DEPTH) {
      const rest = this.tokens.slice(this.at).join("");
      this.at = this.tokens.length;
      return leaf("mtext", rest);
    }
    this.depth += 1;
    const token = this.tokens[this.at++];
    const made = token?.startsWith("\\") ? this.command(token.slice(1)) : this.plain(token);
    this.depth -= 1;
    return made;
  }

  plain(token) {
    if (token === undefined || !token.trim() || token === "&") return null;
    if (token === "{") {
      const inner = this.rows((it) => it === "}");
      this.at += 1;
      return row(inner);
    }
    if (token === "}") return null;
    if (/^\d/.test(token)) return leaf("mn", token);
    if (/\p{L}/u.test(token)) return leaf("mi", token);
    if (token === "-") return leaf("mo", "−");
    if (token === "~") return leaf("mtext", "\u00a0");
    if (token === "_" || token === "^") {
      // Without a base.
      this.at -= 1;
      return element("mrow");
    }
    return leaf("mo", token, "()[]|".includes(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (Object.hasOwn(IDENTIFIERS, name)) return leaf("mi", IDENTIFIERS[name]);
    if (Object.hasOwn(LARGE_OPERATORS, name))
      return leaf("mo", LARGE_OPERATORS[name], { largeop: "true", movablelimits: "true" });
    if (Object.hasOwn(OPERATORS, name)) return leaf("mo", OPERATORS[name]);
    if (Object.hasOwn(DELIMITERS, name)) return leaf("mo", DELIMITERS[name], { stretchy: "false" });
    if (Object.hasOwn(SPACES, name)) return element("mspace", [], { width: SPACES[name] });
    if (FUNCTIONS.has(name)) return leaf("mi", name, { mathvariant: "normal" });
    if (Object.hasOwn(ALPHABETS, name)) return lettered(this.groupText(), LETTERS[ALPHABETS[name]]);
    if (Object.hasOwn(ACCENTS, name)) return this.accent(name);
    if (TEXTS.has(name)) return leaf("mtext", this.groupText().replace(/^\s|\s$/g, "\u00a0"));
    if (IGNORED.has(name)) return null;
    if (SIZES.has(name)) return leaf("mo", this.delimiter());
    return this.construction(name);
  }

  construction(name) {
    if (["frac", "dfrac", "tfrac", "cfrac"].includes(name))
      return element("mfrac", [this.argument(), this.argument()]);
    if (name === "binom") {
      const parts = element("mfrac", [this.argument(), this.argument()], { linethickness: "0" });
      return element("mrow", [leaf("mo", "("), parts, leaf("mo", ")")]);
    }
    if (name === "sqrt") return this.root();
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment();
    if (name === "not") return leaf("mo", `${this.argument().textContent}\u0338`);
    if (["overset", "stackrel"].includes(name)) {
      const above = this.argument();
      return element("mover", [this.argument(), above]);
    }
    if (name === "underset") {
      const below = this.argument();
      return element("munder", [this.argument(), below]);
    }
    if (name === "boxed") return element("mrow", [this.argument()], { class: "boxed" });
    if (name === "color") this.groupText();
    if (name === "color" || name === "end" || name === "right") return name === "color" ? null : this.stray(name);
    return leaf("mtext", /^[a-zA-Z]/.test(name) ? `\\${name}` : name);
  }

  // An end without its beginning draws nothing.
  stray(name) {
    if (name === "end") this.groupText();
    else this.delimiter();
    return null;
  }

  accent(name) {
    const isBelow = name.startsWith("under");
    const mark = leaf("mo", ACCENTS[name], { stretchy: String(/wide|over|under/.test(name)) });
    return element(isBelow ? "munder" : "mover", [this.argument(), mark], {
      [isBelow ? "accentunder" : "accent"]: "true",
    });
  }

  root() {
    this.skipSpaces();
    if (this.next !== "[") return element("msqrt", [this.argument()]);
    this.at += 1;
    const degree = row(this.rows((it) => it === "]"));
    this.at += 1;
    return element("mroot", [this.argument(), degree]);
  }

  delimiter() {
    this.skipSpaces();
    const token = this.tokens[this.at++] || "";
    if (token === ".") return "";
    return token.startsWith("\\")
      ? DELIMITERS[token.slice(1)] || OPERATORS[token.slice(1)] || token.slice(1)
      : token;
  }

  fenced() {
    const open = this.delimiter();
    const inner = this.rows((it) => it === "\\right");
    this.at += 1;
    const close = this.at <= this.tokens.length ? this.delimiter() : "";
    return between(open, inner, close);
  }

  environment() {
    const name = this.groupText().replace("*", "");
    if (name === "array") this.groupText();
    const lines = this.table((it) => it === "\\end");
    this.at += 1;
    this.groupText();
    const fences = Object.hasOwn(FENCES, name) ? FENCES[name] : null;
    return fences
      ? between(fences[0], [this.asTable(lines, name === "cases")], fences[1])
      : this.asTable(lines, true);
  }
}

function between(open, inner, close) {
  const fence = (text, form) => (text ? [leaf("mo", text, { stretchy: "true", fence: "true", form })] : []);
  return element("mrow", [...fence(open, "prefix"), ...inner, ...fence(close, "postfix")]);
}

function withScripts(base, below, above, display) {
  const isLarge =
    base.getAttribute?.("largeop") === "true" ||
    ["lim", "max", "min", "sup", "inf", "argmax", "argmin"].includes(base.textContent);
  const stands =
    (isLarge && display) || base.hasAttribute?.("accentunder") || base.getAttribute?.("accent") === "true";
  const integral = "∫∬∭∮".includes(base.textContent);
  const names = stands && !integral ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
  if (below && above) return element(names[2], [base, below, above]);
  return below ? element(names[0], [base, below]) : element(names[1], [base, above]);
}

// Letters of another alphabet, as Unicode has them.
function lettered(text, alphabet) {
  if (!/^[A-Za-z0-9]+$/.test(text))
    return leaf(
      "mi",
      text.replace(/\\([a-zA-Z]+)/g, (_, name) => IDENTIFIERS[name] || name),
    );
  const letter = (it) => {
    if (Object.hasOwn(alphabet.except, it)) return alphabet.except[it];
    const first = /\d/.test(it) ? "0" : /[a-z]/.test(it) ? "a" : "A";
    return alphabet[first] ? String.fromCodePoint(alphabet[first] + it.charCodeAt(0) - first.charCodeAt(0)) : it;
  };
  return leaf("mi", [...text].map(letter).join(""), { mathvariant: "normal" });
}
