// One message as an article: its text, thinking, files and calls, what it took, and what can be done with it.

import { copyButton } from "./code.js";
import { button, make, number, tokenWords } from "./elements.js";
import { render } from "./markdown.js";
import { questionText } from "./prompt.js";

const TITLES = { user: "You", assistant: "Model", tool: "Result" };
// A few tokens may come in one piece, which says nothing of their time.
const MIN_RATE_SECONDS = 0.2;

export class MessageView {
  // actions: what the buttons do, by name, each with the message.
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    // Each block of a reply has a direction of its own.
    this.text = make(
      "div",
      message.role === "assistant" ? { className: "text" } : { className: "text", dir: "auto" },
    );
    this.thinking = null;
    this.calls = make("div", { className: "calls" });
    this.foot = make("div", { className: "foot" });
    const title = message.role === "tool" ? `Result of ${message.name || "a call"}` : TITLES[message.role];
    this.article = make(
      "article",
      { className: message.role },
      make("h3", { textContent: title }),
      this.text,
      this.calls,
      this.foot,
    );
    this.article.dataset.id = message.id;
  }

  // Draws what the message has. unfinished: whether more is to come.
  draw(unfinished = false) {
    const { message } = this;
    if (message.role !== "assistant") this.drawQuestion();
    else {
      if (message.thinking) this.drawThinking(unfinished);
      render(this.text, message.content, unfinished);
      this.calls.replaceChildren(...(message.calls || []).map((call) => callCard(call)));
    }
    this.article.setAttribute("aria-busy", unfinished);
    if (unfinished) this.foot.replaceChildren();
  }

  drawQuestion() {
    const files = (this.message.files || []).map((file) =>
      make(
        "details",
        { className: "file" },
        make("summary", { dir: "auto", textContent: `${file.name} (${number(file.tokens)} tokens)` }),
        make("pre", { textContent: file.text, tabIndex: 0, dir: "auto", role: "group", "aria-label": file.name }),
      ),
    );
    this.text.replaceChildren(...files, this.message.content);
  }

  drawThinking(unfinished) {
    if (!this.thinking) {
      this.thinking = make("div");
      const summary = make("summary");
      this.text.before(make("details", { className: "thinking" }, summary, this.thinking));
    }
    const isOpen = unfinished && !this.message.content;
    this.thinking.parentNode.firstChild.textContent = isOpen ? "Thinking…" : "Thinking";
    render(this.thinking, this.message.thinking, isOpen);
  }

  // Draws what stands below a message that is complete.
  // branch: {at, count, choose}, its place among the others of its place. isLast: whether it ends the path.
  drawFoot(branch, isLast) {
    const { message, actions } = this;
    const notes = [];
    if (message.role === "assistant") notes.push(...replyNotes(message));
    if (isLast && message.reason === "tool_calls") this.calls.append(this.resultForm());
    const buttons = [];
    if (branch.count > 1) buttons.push(branchButtons(branch));
    if (navigator.clipboard && (message.content || message.files)) {
      const what = message.role === "user" ? "question" : "reply";
      buttons.push(
        copyButton(() => (message.role === "user" ? questionText(message) : message.content), `Copy this ${what}`),
      );
    }
    if (message.role === "user")
      buttons.push(button("Edit", () => this.edit(), { "aria-label": "Edit this question" }));
    if (message.role === "assistant") {
      if (isLast && canGoOn(message))
        buttons.push(button("Continue", () => actions.goOn(message), { "aria-label": "Continue this reply" }));
      buttons.push(
        button("Regenerate", () => actions.regenerate(message), { "aria-label": "Regenerate this reply" }),
      );
    }
    const group = make(
      "div",
      { className: "actions", role: "group", "aria-label": "What to do with this message" },
      ...buttons,
    );
    this.foot.replaceChildren(...notes, group);
  }

  // Lets the question be written anew. The old one stays in a branch of its own.
  edit() {
    const { message } = this;
    const field = make("textarea", {
      value: message.content,
      rows: 3,
      dir: "auto",
      "aria-label": "The question",
      maxLength: 1_000_000,
    });
    const leave = () => {
      this.draw();
      this.actions.redraw();
      this.foot.querySelector('[aria-label="Edit this question"]')?.focus();
    };
    const form = make(
      "form",
      { className: "edit" },
      field,
      make(
        "div",
        { className: "row" },
        button("Cancel", leave),
        make("button", { type: "submit", className: "strong", textContent: "Ask again" }),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() || message.files) this.actions.edit(message, field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.text.replaceChildren(form);
    this.foot.replaceChildren();
    field.focus();
  }

  // Takes what the called tools answered, as this page runs none.
  resultForm() {
    const { message, actions } = this;
    const fields = message.calls.map((call) =>
      make("textarea", {
        rows: 2,
        dir: "auto",
        required: true,
        "aria-label": `Result of ${call.name}`,
        placeholder: `Result of ${call.name}`,
      }),
    );
    const form = make(
      "form",
      { className: "edit" },
      ...fields,
      make(
        "div",
        { className: "row" },
        make("button", {
          type: "submit",
          className: "strong",
          textContent: fields.length > 1 ? "Send results" : "Send result",
        }),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      actions.answerCalls(
        message,
        fields.map((it) => it.value),
      );
    });
    return form;
  }
}

function callCard(call) {
  return make(
    "section",
    { className: "call", "aria-label": `Call of ${call.name}` },
    make("strong", { textContent: call.name }),
    make("pre", {
      tabIndex: 0,
      textContent: indented(call.arguments),
      role: "group",
      "aria-label": `Arguments of ${call.name}`,
    }),
  );
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function branchButtons({ at, count, choose }) {
  const step = (text, label, to) =>
    button(text, () => choose(to), { "aria-label": label, disabled: to < 0 || to >= count });
  return make(
    "span",
    { className: "branches" },
    step("‹", "Show the version before", at - 1),
    ` ${at + 1}/${count} `,
    step("›", "Show the version after", at + 1),
  );
}

// Whether a reply was cut. One that obeys a schema can only be made anew.
function canGoOn(message) {
  const isCut = ["length", "stopped", "failed", "", undefined].includes(message.reason);
  return isCut && Boolean(message.content || message.thinking) && !message.calls && message.limit !== "schema";
}

function replyNotes(message) {
  const note = (className, text) => make("p", { className, textContent: text });
  const notes = [];
  const words = [factWords(message.facts), cutWords(message)].filter(Boolean).join(" · ");
  if (words) notes.push(note("facts", words));
  if (message.verdict) notes.push(note(message.verdict.startsWith("Obeys") ? "facts" : "wrong", message.verdict));
  if (message.error) notes.push(note("wrong", message.error));
  return notes;
}

function cutWords(message) {
  if (message.reason === "stopped") return "stopped";
  if (message.reason === "length")
    return message.limit === "set" ? "cut at the length that the settings say" : "cut, as the context is full";
  return message.reason ? "" : "not complete";
}

function factWords(facts) {
  if (!facts?.tokens) return "";
  const rate =
    facts.seconds > MIN_RATE_SECONDS && facts.tokens > 1
      ? `, ${((facts.tokens - 1) / facts.seconds).toFixed(1)} a second`
      : "";
  const cached = facts.cached ? `, ${number(facts.cached)} of it kept` : "";
  const warmth = facts.temperature ? ` · at temperature ${facts.temperature}` : "";
  return `${tokenWords(facts.tokens)}${rate} · first after ${facts.first.toFixed(1)} s, prompt of ${number(facts.prompt)}${cached}${warmth}`;
}
