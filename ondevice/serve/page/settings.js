// The dialog with a chat's settings. What is left empty is as the model's authors recommend.

import { chats, save, setDefaults } from "./chats.js";
import { find, number } from "./elements.js";
import { live } from "./live.js";

const NAMES = [
  "system",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "seed",
  "max_tokens",
  "think",
  "schema",
  "tools",
];
const dialog = find("settings");
const field = (name) => find(`set-${name}`);

find("show-settings").addEventListener("click", () => {
  for (const name of NAMES) field(name).value = chats.current.settings[name] || "";
  find("set-as-default").checked = false;
  find("settings-error").textContent = "";
  showDefaults();
  dialog.showModal();
});
find("settings-cancel").addEventListener("click", () => dialog.close());
find("settings-reset").addEventListener("click", () => {
  for (const name of NAMES) field(name).value = "";
});
find("settings-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const settings = Object.fromEntries(
    NAMES.map((name) => [name, field(name).value.trim()]).filter(([, value]) => value),
  );
  const fault = faultOf(settings);
  find("settings-error").textContent = fault;
  if (fault) return;
  chats.current.settings = settings;
  if (find("set-as-default").checked) setDefaults(settings);
  if (chats.all.has(chats.current.id)) save(chats.current);
  showMark();
  dialog.close();
});

// Shows what the model's authors recommend, and what its template can do.
function showDefaults() {
  const model = live.state?.models[find("model").value || live.state.loaded];
  if (!model) return;
  for (const [name, value] of Object.entries(model.sampling)) field(name).placeholder = String(value);
  field("max_tokens").placeholder = `${number(model.context)} at most`;
  find("row-think").hidden = !model.abilities.includes("thinking");
  find("tools-note").hidden = model.abilities.includes("tools");
}

function faultOf(settings) {
  if (settings.schema && !isKind(parsed(settings.schema), "object")) return "The schema is no JSON object.";
  if (!settings.tools) return "";
  const tools = parsed(settings.tools);
  const isTool = (it) => it?.type === "function" && typeof it.function?.name === "string";
  if (Array.isArray(tools) && tools.length && tools.every(isTool)) return "";
  return 'Tools are a JSON list of {"type": "function", "function": {"name": …, "parameters": …}}.';
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

const isKind = (value, kind) => typeof value === kind && value !== null && !Array.isArray(value);

// Says on the button whether the chat has settings of its own.
export function showMark() {
  const count = Object.keys(chats.current.settings).length;
  find("show-settings").textContent = count ? `Settings (${count})` : "Settings";
}
