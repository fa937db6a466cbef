// The list of chats beside the conversation: search, new ones, export, import and deletion.

import { chats, fresh, onChats, remove, save, show } from "./chats.js";
import { button, confirmed, find, make } from "./elements.js";
import { focusMessage } from "./composer.js";
import { exportChats, exportMarkdown, importChats } from "./transfer.js";
import { contains, title } from "./tree.js";

const list = find("chat-list");
const search = find("search");
const toggle = find("show-chats");

onChats(draw);
search.addEventListener("input", draw);
find("new").addEventListener("click", () => choose(fresh()));
find("export").addEventListener("click", () => exportChats([...chats.all.values()]));
find("import").addEventListener("click", () => find("import-file").click());
find("import-file").addEventListener("change", async (event) => {
  await takeFiles([...event.target.files]);
  event.target.value = "";
});
toggle.addEventListener("click", () => setOpen(!document.body.classList.contains("chats-open")));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.body.classList.contains("chats-open")) setOpen(false);
});

// Whether the list is shown where there is no room beside the conversation.
function setOpen(isOpen) {
  document.body.classList.toggle("chats-open", isOpen);
  toggle.setAttribute("aria-expanded", isOpen);
  toggle.textContent = isOpen ? "Close" : "Chats";
  (isOpen ? find("new") : toggle).focus();
}

function choose(chat) {
  if (document.body.classList.contains("chats-open")) setOpen(false);
  show(chat);
  focusMessage();
}

function draw() {
  const wanted = search.value.trim();
  const shown = [...chats.all.values()]
    .filter((it) => !wanted || contains(it, wanted))
    .sort((a, b) => b.changed - a.changed);
  const focused = document.activeElement?.closest?.("li")?.dataset.id;
  list.replaceChildren(...shown.map(entry));
  if (focused) [...list.children].find((it) => it.dataset.id === focused)?.firstChild.focus();
  find("no-chats").hidden = shown.length > 0;
  find("no-chats").textContent = wanted
    ? `No chat has “${wanted}” in it.`
    : "Chats that you begin are listed here.";
  find("export").disabled = !chats.all.size;
  find("chats-fault").textContent = chats.fault;
}

function entry(chat) {
  const name = title(chat);
  const isCurrent = chat === chats.current;
  const open = button(name, () => choose(chat), { className: "chat-name", dir: "auto", title: name });
  if (isCurrent) open.setAttribute("aria-current", "true");
  const made = make("li", {}, open, menu(chat, name));
  made.dataset.id = chat.id;
  return made;
}

function menu(chat, name) {
  const details = make("details", { className: "menu" });
  const act = (action) => () => {
    details.open = false;
    action();
  };
  details.append(
    make("summary", { textContent: "⋯", "aria-label": `More about ${name}` }),
    make(
      "div",
      {},
      button(
        "Export",
        act(() => exportChats([chat])),
      ),
      button(
        "Export as Markdown",
        act(() => exportMarkdown(chat)),
      ),
      button(
        "Delete",
        act(async () => {
          if (await confirmed(`Delete the chat “${name}”?`, "Delete")) await remove(chat);
        }),
      ),
    ),
  );
  details.addEventListener("focusout", (event) => {
    if (!details.contains(event.relatedTarget)) details.open = false;
  });
  return details;
}

async function takeFiles(files) {
  const fault = find("chats-fault");
  fault.textContent = "";
  for (const file of files) {
    try {
      const made = await importChats(file, chats.all);
      for (const chat of made) await save(chat);
      fault.textContent = `${made.length} of ${file.name} added.`;
    } catch (error) {
      fault.textContent = error.message;
    }
  }
}
