// Makers of elements. A text becomes a text node, never markup.

export const find = (id) => document.getElementById(id);

// An element with properties or, by names that aren't properties, attributes.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function button(text, onClick, properties = {}) {
  const made = make("button", { type: "button", textContent: text, ...properties });
  made.addEventListener("click", onClick);
  return made;
}

// Shows a text for a moment in place of a button's own, as an answer to its press.
export function flash(target, text) {
  const before = target.textContent;
  target.textContent = text;
  setTimeout(() => (target.textContent = before), 1500);
}

export function bytes(count) {
  const names = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let value = count;
  while (Math.abs(value) >= 999.5 && at < names.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at === 0 ? value : value.toPrecision(3)} ${names[at]}`;
}

export const number = (value) => Math.round(value).toLocaleString("en");

export const tokenWords = (count) => `${number(count)} token${count === 1 ? "" : "s"}`;

export function seconds(value) {
  if (value < 1) return "under 1 s";
  if (value < 90) return `${Math.round(value)} s`;
  return `${Math.round(value / 60)} min`;
}

// Asks a question in a dialog. Resolves to whether the answer is yes.
export function confirmed(question, yes) {
  return new Promise((resolve) => {
    const dialog = make("dialog", { "aria-label": question });
    const answer = (value) => {
      dialog.close();
      dialog.remove();
      resolve(value);
    };
    dialog.append(
      make("p", { textContent: question }),
      make(
        "div",
        { className: "row" },
        button("Cancel", () => answer(false)),
        button(yes, () => answer(true), { className: "strong" }),
      ),
    );
    dialog.addEventListener("cancel", () => answer(false));
    document.body.append(dialog);
    dialog.showModal();
  });
}
