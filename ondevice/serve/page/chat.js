// The conversation: asks the server, shows the reply as it comes, and keeps the transcript for a reload.

import { render } from "./markdown.js";
import { panel, watch } from "./panel.js";
import { ask, events, Refused, setKey } from "./server.js";

const TRANSCRIPT = "ondevice-transcript";
const THEME = "ondevice-theme";
const SAVE_SECONDS = 1;
const LEAST_SECONDS = 0.2;
const find = (id) => document.getElementById(id);
const log = find("log");
const message = find("message");

let messages = kept();
let replying = null;
let saved = 0;

// The transcript of this tab. Storage is a copy that may be full, old or not there.
function kept() {
  try {
    const found = JSON.parse(sessionStorage.getItem(TRANSCRIPT) || "[]");
    const known = (it) => ["user", "assistant"].includes(it.role) && typeof it.content === "string";
    return found.filter(known);
  } catch {
    return [];
  }
}

function keep() {
  saved = Date.now();
  try {
    sessionStorage.setItem(TRANSCRIPT, JSON.stringify(messages));
  } catch {
    // It is too long to keep; the page still has it.
  }
}

function article(role, content) {
  const found = document.createElement("article");
  found.className = role;
  const title = document.createElement("h3");
  title.textContent = role === "user" ? "You" : "Model";
  const body = document.createElement("div");
  if (role === "user") body.textContent = content;
  else render(body, content);
  found.append(title, body);
  log.append(found);
  return found;
}

function note(parent, className, text) {
  const found = document.createElement("p");
  found.className = className;
  found.textContent = text;
  parent.append(found);
}

function status(text) {
  find("status").textContent = text;
}

// Follows the end of the text unless the reader has scrolled up.
function following(change) {
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

function setReplying(controller) {
  replying = controller;
  find("send").hidden = controller !== null;
  find("stop").hidden = controller === null;
}

async function send(text) {
  messages.push({ role: "user", content: text });
  article("user", text);
  keep();
  const shown = article("assistant", "");
  log.scrollTop = log.scrollHeight;
  shown.setAttribute("aria-busy", "true");
  setReplying(new AbortController());
  status("Reading the message.");
  const reply = new Reply(shown);
  try {
    await reply.read(messages, replying.signal);
    status("The reply is complete.");
  } catch (error) {
    following(() => reply.fail(error));
    status(error.name === "AbortError" ? "Stopped." : "The reply failed.");
    if (error instanceof Refused && error.status === 401) await askKey();
  }
  reply.finish();
  shown.removeAttribute("aria-busy");
  setReplying(null);
  keep();
}

// One reply, in the article that shows it.
class Reply {
  constructor(shown) {
    this.shown = shown;
    this.entry = { role: "assistant", content: "" };
    this.thought = "";
    this.thinking = null;
    this.drawing = 0;
    this.begun = performance.now();
    this.first = 0;
    this.usage = null;
    this.reason = "";
  }

  async read(asked, signal) {
    const body = {
      model: find("model").value || undefined,
      messages: asked.slice(),
      stream: true,
      stream_options: { include_usage: true },
      return_progress: true,
    };
    const response = await ask("/v1/chat/completions", body, signal);
    messages.push(this.entry);
    for await (const event of events(response)) this.add(event);
    if (!this.reason) throw new Error("the connection was lost");
  }

  add(event) {
    if (event.usage) this.usage = event.usage;
    const progress = event.prompt_progress;
    if (progress) {
      status(`Reading the message: ${progress.processed} of ${progress.total} tokens.`);
      return;
    }
    const choice = event.choices[0];
    if (!choice) return;
    if (!this.first) status("Writing.");
    this.first ||= performance.now();
    this.entry.content += choice.delta.content || "";
    this.thought += choice.delta.reasoning_content || "";
    this.reason = choice.finish_reason || this.reason;
    // A frame isn't drawn for each of several tokens, and none while the page can't be seen.
    this.drawing ||= requestAnimationFrame(() => following(() => this.draw()));
    if (Date.now() - saved > 1000 * SAVE_SECONDS) keep();
  }

  draw() {
    this.drawing = 0;
    if (this.thought) this.showThought();
    render(this.shown.children[this.thinking ? 2 : 1], this.entry.content);
  }

  showThought() {
    if (!this.thinking) {
      const details = document.createElement("details");
      details.className = "thinking";
      const summary = document.createElement("summary");
      summary.textContent = "Thinking";
      this.thinking = document.createElement("div");
      details.append(summary, this.thinking);
      this.shown.children[0].after(details);
    }
    render(this.thinking, this.thought);
  }

  fail(error) {
    this.failed = true;
    if (error.name === "AbortError") note(this.shown, "facts", "Stopped.");
    else note(this.shown, "wrong", error.message);
  }

  finish() {
    cancelAnimationFrame(this.drawing);
    following(() => {
      this.draw();
      if (!this.failed) note(this.shown, "facts", this.facts());
    });
    // A message that got no reply can be sent again.
    if (!this.entry.content && messages.at(-1) === this.entry) messages.pop();
    if (messages.at(-1)?.role === "user") message.value ||= messages.pop().content;
  }

  facts() {
    const tokens = this.usage?.completion_tokens || 0;
    const seconds = (performance.now() - this.first) / 1000;
    // A few tokens may come in one piece, which says nothing of their time.
    const rate = seconds > LEAST_SECONDS && tokens > 1 ? `, ${((tokens - 1) / seconds).toFixed(1)} a second` : "";
    const wait = `, the first after ${((this.first - this.begun) / 1000).toFixed(1)} s`;
    const full = this.reason === "length" ? "; cut off, as the context is full" : "";
    return `${tokens} tokens${rate}${wait}${full}`;
  }
}

// Asks for the key, once at a time. Resolves when one is given.
let asking = null;
function askKey() {
  const dialog = find("key-dialog");
  asking ||= new Promise((done) => {
    find("key-form").onsubmit = () => {
      setKey(find("key").value);
      asking = null;
      done();
    };
    dialog.showModal();
  });
  return asking;
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  find("theme").value = theme;
}

function showModels(state) {
  const select = find("model");
  const names = [...select.options].map((it) => it.value);
  if (names.join("\n") === state.models.join("\n")) return;
  const before = select.value;
  select.replaceChildren(...state.models.map((name) => new Option(name, name)));
  if (state.models.includes(before)) select.value = before;
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = message.value.trim();
  if (!text || replying) return;
  message.value = "";
  message.focus();
  send(text);
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && replying) replying.abort();
});
find("stop").addEventListener("click", () => {
  replying?.abort();
  message.focus();
});
find("new").addEventListener("click", () => {
  replying?.abort();
  messages = [];
  log.replaceChildren();
  keep();
  status("");
  message.focus();
});
find("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
find("theme").addEventListener("change", (event) => {
  localStorage.setItem(THEME, event.target.value);
  setTheme(event.target.value);
});
window.addEventListener("pagehide", keep);

setTheme(localStorage.getItem(THEME) || "");
for (const it of messages) article(it.role, it.content);
log.scrollTop = log.scrollHeight;
if (window.matchMedia("(max-width: 48rem)").matches) find("panel").open = false;
panel.onState = showModels;
panel.onKeyNeeded = askKey;
message.focus();
watch();
