// Where a question is written: the text, the files dropped into it, and what both take of the context.

import { chats } from "./chats.js";
import { button, find, make, number } from "./elements.js";
import { countTokens, fileTokens, readFile } from "./files.js";
import { live } from "./live.js";
import { path } from "./tree.js";

const COUNT_MILLISECONDS = 400;
const MANY_CHARS = 400;
const message = find("message");
const fault = find("ask-error");
let files = [];
let counting = null;
let textTokens = 0;

export const composer = { onSend: () => {}, onStop: () => {}, replying: false };

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
message.addEventListener("keydown", (event) => {
  // Keyboards on glass have no other key for a new line.
  const begins = event.shiftKey || event.isComposing || isTouched();
  if (event.key !== "Enter" || begins) return;
  event.preventDefault();
  send();
});
message.addEventListener("input", () => {
  fault.textContent = "";
  clearTimeout(counting);
  counting = setTimeout(countText, COUNT_MILLISECONDS);
});
find("stop").addEventListener("click", () => {
  composer.onStop();
  focusMessage();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && composer.replying && !document.querySelector("dialog[open]")) composer.onStop();
});
find("attach").addEventListener("click", () => find("attach-file").click());
find("attach-file").addEventListener("change", async (event) => {
  await takeFiles([...event.target.files]);
  event.target.value = "";
});
message.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) {
    event.preventDefault();
    takeFiles([...event.clipboardData.files]);
  }
});
for (const kind of ["dragover", "drop", "dragleave"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") takeFiles([...event.dataTransfer.files]);
  });
}

const isTouched = () => window.matchMedia("(pointer: coarse)").matches;

// Goes on to the text. Not where a keyboard would come up over the reply.
export function focusMessage() {
  if (isTouched()) message.blur();
  else message.focus();
}

function send() {
  const text = message.value.trim();
  if ((!text && !files.length) || composer.replying) return;
  const over = draftTokens() - context();
  if (context() && over > 0) {
    fault.textContent = `This is ${number(over)} tokens more than the context of ${number(context())} has room for.`;
    return;
  }
  const sent = files;
  message.value = "";
  files = [];
  textTokens = 0;
  fault.textContent = "";
  showFiles();
  focusMessage();
  composer.onSend(text, sent);
}

export function setReplying(isReplying) {
  composer.replying = isReplying;
  find("send").hidden = isReplying;
  find("stop").hidden = !isReplying;
}

// Says what the chat and the question that is written take of the context.
export function showSize() {
  const used = path(chats.current).findLast((it) => it.facts)?.facts.context || 0;
  const drafted = draftTokens();
  const size = find("size");
  size.hidden = !used && !drafted;
  if (!context() || size.hidden) return;
  const all = used + drafted;
  size.textContent = `${number(all)} of ${number(context())} tokens of context`;
  size.classList.toggle("wrong", all > context());
}

const modelName = () => find("model").value;
const context = () => live.state?.models[modelName() || live.state.loaded]?.context || 0;
const draftTokens = () => textTokens + files.reduce((sum, it) => sum + it.tokens, 0);

async function countText() {
  const text = message.value;
  // A short text takes about a token for four characters, which isn't worth asking.
  textTokens =
    text.length < MANY_CHARS
      ? Math.ceil(text.length / 4)
      : await countTokens(text, modelName()).catch(() => Math.ceil(text.length / 4));
  showSize();
}

async function takeFiles(given) {
  fault.textContent = "";
  for (const each of given) {
    try {
      const file = await readFile(each);
      file.tokens = await fileTokens(file, modelName());
      files.push(file);
    } catch (error) {
      fault.textContent = error.message;
    }
    showFiles();
  }
  focusMessage();
}

function showFiles() {
  find("files").replaceChildren(
    ...files.map((file) => {
      const over = context() ? file.tokens - context() : 0;
      const size =
        over > 0 ? `${number(file.tokens)} tokens, ${number(over)} too many` : `${number(file.tokens)} tokens`;
      const leave = button(
        "×",
        () => {
          files = files.filter((it) => it !== file);
          showFiles();
          focusMessage();
        },
        { "aria-label": `Leave out ${file.name}` },
      );
      return make(
        "li",
        { className: over > 0 ? "wrong" : "" },
        make("span", { textContent: file.name, dir: "auto" }),
        ` ${size} `,
        leave,
      );
    }),
  );
  find("files").hidden = !files.length;
  showSize();
}
