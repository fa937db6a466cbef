// A chat as a tree of messages: every question that was edited and every reply that was made anew is kept.
//
// A chat is {id, changed, settings, leaf, messages}; a message is {id, parent, role, content, ...}, its parent
// the id of the one before it or "". What is shown is the path from the first message to the leaf.

const MAX_MESSAGES = 10_000;
const MAX_TITLE_CHARS = 48;
const TEXTS = ["content", "thinking", "error", "reason", "model", "callId", "name", "limit", "verdict"];

export const newId = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

export function newChat() {
  return { id: newId(), changed: Date.now(), settings: {}, leaf: "", messages: {} };
}

// Adds a message behind another one, and makes it the leaf.
export function add(chat, parent, fields) {
  const message = { id: newId(), parent, made: Date.now(), content: "", ...fields };
  chat.messages[message.id] = message;
  chat.leaf = message.id;
  chat.changed = Date.now();
  return message;
}

// The messages that are shown, first to last.
export function path(chat, leaf = chat.leaf) {
  const shown = [];
  for (
    let message = chat.messages[leaf];
    message && shown.length <= MAX_MESSAGES;
    message = chat.messages[message.parent]
  ) {
    shown.push(message);
  }
  return shown.reverse();
}

// The messages behind each message, oldest first, by its id.
export function children(chat) {
  const behind = new Map();
  for (const message of Object.values(chat.messages)) {
    if (!behind.has(message.parent)) behind.set(message.parent, []);
    behind.get(message.parent).push(message);
  }
  for (const messages of behind.values()) messages.sort((a, b) => a.made - b.made);
  return behind;
}

// Shows the branch of a message, down to what was written last in it.
export function select(chat, message) {
  const behind = children(chat);
  let last = message;
  for (let steps = 0; steps < MAX_MESSAGES && behind.has(last.id); steps += 1) last = behind.get(last.id).at(-1);
  chat.leaf = last.id;
}

// The first words of a chat.
export function title(chat) {
  const first = path(chat).find((it) => it.role === "user");
  const text = (first?.content || first?.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  if (text.length <= MAX_TITLE_CHARS) return text || "New chat";
  return `${text.slice(0, MAX_TITLE_CHARS).replace(/\s\S*$/, "")}…`;
}

// Whether any message of a chat has a text in it, whatever its case.
export function contains(chat, text) {
  const wanted = text.toLowerCase();
  return Object.values(chat.messages).some((it) => it.content.toLowerCase().includes(wanted));
}

// A chat as this page writes them, of one from a file or the database. Throws for what is none.
export function checked(value) {
  if (typeof value?.id !== "string" || typeof value.messages !== "object" || value.messages === null) {
    throw new Error("it holds something that is no chat");
  }
  const given = Object.values(value.messages);
  if (given.length > MAX_MESSAGES)
    throw new Error(`a chat has ${given.length} messages; at most ${MAX_MESSAGES} are kept`);
  const chat = { ...newChat(), id: value.id.slice(0, 100), changed: Number(value.changed) || 0 };
  for (const each of given) {
    const message = checkedMessage(each);
    chat.messages[message.id] = message;
  }
  for (const message of Object.values(chat.messages)) {
    if (!Object.hasOwn(chat.messages, message.parent)) message.parent = "";
  }
  const settings = value.settings;
  for (const [name, setting] of Object.entries(settings && typeof settings === "object" ? settings : {})) {
    if (typeof setting === "string" && name !== "__proto__") chat.settings[name] = setting;
  }
  if (Object.hasOwn(chat.messages, value.leaf)) chat.leaf = value.leaf;
  else if (given.length) select(chat, { id: "" });
  return chat;
}

function checkedMessage(value) {
  if (
    !["user", "assistant", "tool"].includes(value?.role) ||
    typeof value.id !== "string" ||
    !value.id ||
    value.id === "__proto__"
  ) {
    throw new Error("it holds something that is no message");
  }
  const message = {
    id: value.id,
    role: value.role,
    parent: String(value.parent ?? ""),
    made: Number(value.made) || 0,
    content: "",
  };
  for (const name of TEXTS) if (typeof value[name] === "string") message[name] = value[name];
  const list = (given, names) =>
    (Array.isArray(given) ? given : [])
      .filter((it) => names.every((name) => typeof it?.[name] === "string"))
      .map((it) => ({
        ...Object.fromEntries(names.map((name) => [name, it[name]])),
        tokens: Number(it.tokens) || 0,
      }));
  if (value.files) message.files = list(value.files, ["name", "text"]);
  if (value.calls) message.calls = list(value.calls, ["id", "name", "arguments"]);
  if (value.facts && typeof value.facts === "object") {
    message.facts = Object.fromEntries(Object.entries(value.facts).filter(([, it]) => typeof it === "number"));
  }
  return message;
}
