// Chats as files: one of all that there are, or of one, and back.

import { checked, newId, path, title } from "./tree.js";

const FORMAT = "ondevice-chats";
const VERSION = 1;
const MAX_FILE_BYTES = 256 * 1024 * 1024;
const ROLES = { user: "You", assistant: "Model", tool: "Result" };

function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

export function exportChats(chats) {
  const content = { format: FORMAT, version: VERSION, chats };
  const name = chats.length === 1 ? fileName(title(chats[0])) : "ondevice-chats";
  download(`${name}.json`, JSON.stringify(content, null, 1), "application/json");
}

// The branch of a chat that is shown, as Markdown.
export function exportMarkdown(chat) {
  const parts = path(chat).map((it) => `## ${ROLES[it.role]}\n\n${it.content}`);
  download(`${fileName(title(chat))}.md`, `# ${title(chat)}\n\n${parts.join("\n\n")}\n`, "text/markdown");
}

const fileName = (text) =>
  text
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-|-$/g, "")
    .slice(0, 60) || "chat";

// The chats in a file. One that differs from a chat of its id gets another. Throws for what holds none.
export async function importChats(file, known) {
  if (file.size > MAX_FILE_BYTES)
    throw new Error(`${file.name} is larger than ${MAX_FILE_BYTES / 1024 / 1024} MiB`);
  let content;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is no JSON`);
  }
  if (content?.format !== FORMAT || !Array.isArray(content.chats))
    throw new Error(`${file.name} holds no chats of this page`);
  if (content.version !== VERSION)
    throw new Error(`${file.name} has version ${content.version}; this page reads ${VERSION}`);
  const made = [];
  for (const value of content.chats) {
    const chat = checked(value);
    const before = known.get(chat.id);
    if (before && JSON.stringify(before) === JSON.stringify(chat)) continue;
    if (before) chat.id = newId();
    made.push(chat);
  }
  return made;
}
