// The chats that there are, and the one that is shown. They are written to the browser's database as they change.

import { readChats, removeChat, writeAtOnce, writeChat } from "./store.js";
import { checked, newChat } from "./tree.js";

const CURRENT = "ondevice-chat";
const DEFAULTS = "ondevice-settings";
const SAVE_SECONDS = 1;
const listeners = [];
const saved = new Map();
const unsaved = new Set();

export const chats = { all: new Map(), current: null, fault: "" };

// Tells whenever a chat was added, changed or removed.
export function onChats(listener) {
  listeners.push(listener);
}

function changed() {
  for (const listener of listeners) listener();
}

// Reads the chats; the one that this tab showed before is shown again.
export async function loadChats() {
  await readAll();
  chats.current = chats.all.get(sessionStorage.getItem(CURRENT)) || fresh();
  changed();
}

// Takes what is new in the database, but for the chat that is shown here.
async function readAll() {
  try {
    const values = await readChats();
    const others = values.filter((it) => !chats.current || it.id !== chats.current.id);
    for (const chat of others.map(readable)) if (chat) chats.all.set(chat.id, chat);
  } catch (error) {
    chats.fault = `Chats aren't kept: ${error.message}`;
  }
}

// Another tab may have added some meanwhile.
document.addEventListener("visibilitychange", async () => {
  if (document.hidden || !chats.current) return;
  await readAll();
  changed();
});

function readable(value) {
  try {
    return checked(value);
  } catch {
    // Another release's, or damaged: it stays where it is.
    return null;
  }
}

// A chat with the settings that new ones have.
export function fresh() {
  const chat = newChat();
  try {
    Object.assign(
      chat.settings,
      checked({ ...chat, settings: JSON.parse(localStorage.getItem(DEFAULTS) || "{}") }).settings,
    );
  } catch {
    localStorage.removeItem(DEFAULTS);
  }
  return chat;
}

export function setDefaults(settings) {
  localStorage.setItem(DEFAULTS, JSON.stringify(settings));
}

export function show(chat) {
  chats.current = chat;
  sessionStorage.setItem(CURRENT, chat.id);
  changed();
}

// Keeps a chat. soon: whether not more often than once in a while, as while a reply comes.
export async function save(chat, soon = false) {
  unsaved.add(chat);
  if (soon && Date.now() - (saved.get(chat.id) || 0) < 1000 * SAVE_SECONDS) return;
  saved.set(chat.id, Date.now());
  if (chat === chats.current) sessionStorage.setItem(CURRENT, chat.id);
  chats.all.set(chat.id, chat);
  if (!soon) changed();
  try {
    await writeChat(chat);
    if (!soon) unsaved.delete(chat);
  } catch (error) {
    chats.fault = `Chats aren't kept: ${error.message}`;
    changed();
  }
}

window.addEventListener("pagehide", () => unsaved.forEach(writeAtOnce));

export async function remove(chat) {
  chats.all.delete(chat.id);
  unsaved.delete(chat);
  await removeChat(chat.id).catch(() => {});
  if (chats.current === chat) show(fresh());
  else changed();
}
