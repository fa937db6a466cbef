// The page: what the parts do with one another. A question is added to the chat, and a reply is written behind it.

import "./budget.js";
import { chats, loadChats, onChats, save } from "./chats.js";
import { composer, focusMessage, setReplying, showSize } from "./composer.js";
import { Conversation } from "./conversation.js";
import { find } from "./elements.js";
import { live, onLive, watch } from "./live.js";
import { write } from "./reply.js";
import { check } from "./schema.js";
import { Refused, setKey } from "./server.js";
import { showMark } from "./settings.js";
import "./sidebar.js";
import { setPhase } from "./speed.js";
import { add, path } from "./tree.js";

const THEME = "ondevice-theme";
// Of replies that are made anew by a model whose own is 0.
const OTHER_TEMPERATURE = "0.7";
const PHASES = {
  waiting: "Waiting.",
  reading: "Reading the message.",
  writing: "Writing.",
  lost: "The server isn't reached.",
};
let running = null;
let shown = null;

const conversation = new Conversation({
  regenerate(message) {
    // A reply that never began is no version of its own.
    const isEmpty = !message.content && !message.thinking && !message.calls;
    answer(isEmpty ? message : add(chats.current, message.parent, { role: "assistant" }), isEmpty ? {} : warmer());
  },
  goOn: (message) => answer(message),
  edit(message, text) {
    const question = add(chats.current, message.parent, { role: "user", content: text, files: message.files });
    answer(add(chats.current, question.id, { role: "assistant" }));
  },
  answerCalls(message, results) {
    let last = message.id;
    message.calls.forEach((call, at) => {
      last = add(chats.current, last, { role: "tool", callId: call.id, name: call.name, content: results[at] }).id;
    });
    answer(add(chats.current, last, { role: "assistant" }));
  },
  chosen: () => {
    stop();
    save(chats.current);
  },
});

composer.onSend = (text, files) => {
  const chat = chats.current;
  const question = add(chat, chat.leaf, { role: "user", content: text, ...(files.length ? { files } : {}) });
  answer(add(chat, question.id, { role: "assistant" }));
};
composer.onStop = stop;

function stop() {
  running?.controller.abort();
}

function status(text) {
  find("status").textContent = text;
}

// What a reply is made anew with, where it would be the same again.
function warmer() {
  const { temperature } = live.state?.models[find("model").value]?.sampling || {};
  return temperature === 0 && !chats.current.settings.temperature ? { temperature: OTHER_TEMPERATURE } : {};
}

// Has a reply written into a message of the chat that is shown. changes: of the chat's settings, for this reply.
async function answer(message, changes = {}) {
  const chat = chats.current;
  while (running) {
    stop();
    await running.ended;
  }
  const controller = new AbortController();
  let ended;
  running = { controller, chat, message, ended: new Promise((resolve) => (ended = resolve)) };
  message.verdict = message.limit = "";
  setReplying(true);
  conversation.begin(message);
  save(chat);
  let kind = "";
  const tell = (next, value) => {
    if (next !== kind) status(PHASES[next]);
    kind = next;
    setPhase(next, value);
    if (next !== "writing") return;
    conversation.grow();
    save(chat, true);
  };
  let outcome = "The reply failed.";
  try {
    const before = path(chat, message.parent);
    await write(message, before, { ...chat.settings, ...changes }, find("model").value, controller.signal, tell);
    if (changes.temperature) message.facts.temperature = Number(changes.temperature);
    judge(message, chat.settings);
    outcome = message.reason === "stopped" ? "Stopped." : "The reply is complete.";
  } catch (error) {
    if (error instanceof Refused && error.status === 401) askKey();
  }
  running = null;
  chat.changed = Date.now();
  save(chat);
  setReplying(false);
  setPhase("idle");
  conversation.end();
  status(outcome);
  showSize();
  ended();
}

// Compares a reply with the schema that it had to obey.
function judge(message, settings) {
  if (!settings.schema || message.calls) return;
  if (message.reason !== "stop") {
    message.limit = "schema";
    return;
  }
  try {
    const { faults, unchecked } = check(JSON.parse(settings.schema), JSON.parse(message.content));
    const left = unchecked.length ? ` Not checked: ${unchecked.join(", ")}.` : "";
    message.verdict = faults.length
      ? `Doesn't obey the schema: ${faults.join("; ")}.${left}`
      : `Obeys the schema.${left}`;
  } catch {
    message.verdict = "Doesn't obey the schema: it is no JSON.";
  }
}

// Asks for the key, once at a time. Resolves when one is given.
let asking = null;
function askKey() {
  asking ||= new Promise((done) => {
    find("key-form").onsubmit = () => {
      setKey(find("key").value);
      asking = null;
      done();
    };
    find("key-dialog").showModal();
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
  const names = Object.keys(state.models);
  const before = [...select.options].map((it) => it.value);
  if (names.join("\n") !== before.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
    showSize();
  }
}

// Another chat is shown: what is written in the one before stops, and is kept.
onChats(() => {
  if (shown === chats.current) return;
  shown = chats.current;
  if (running && running.chat !== shown) stop();
  conversation.show();
  conversation.toEnd();
  status("");
  showMark();
  showSize();
});
onLive("state", showModels);
onLive("keyNeeded", askKey);
find("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
find("model").addEventListener("change", showSize);
find("theme").addEventListener("change", (event) => {
  localStorage.setItem(THEME, event.target.value);
  setTheme(event.target.value);
});

setTheme(localStorage.getItem(THEME) || "");
await loadChats();
focusMessage();
document.body.dataset.ready = "yes";
if (!live.state) watch();
