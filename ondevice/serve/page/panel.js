// The panel beside the chat: the budget as a slider, the plan, and figures as they change.

import { ask, events, Refused } from "./server.js";

const RATE_SECONDS = 3;
// Positions of the slider, from the least budget to all that the model can use.
const STEPS = 200;
const RETRY_SECONDS = [1, 2, 5, 10];
const find = (id) => document.getElementById(id);
const slider = find("budget");

export const panel = { state: null, onState: () => {}, onKeyNeeded: async () => {} };

let history = [];
let wanted = null;
let sending = false;
let watching = null;

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

// Follows the server while the page can be seen.
export async function watch() {
  let failures = 0;
  while (!document.hidden) {
    watching = new AbortController();
    try {
      for await (const state of events(await ask("/page/live", undefined, watching.signal))) {
        failures = 0;
        show(state);
      }
    } catch (error) {
      if (document.hidden) break;
      if (error instanceof Refused && error.status === 401) {
        await panel.onKeyNeeded();
        continue;
      }
      offline(error);
    }
    await new Promise((done) => setTimeout(done, 1000 * RETRY_SECONDS[Math.min(failures, 3)]));
    failures += 1;
  }
  watching = null;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) watching?.abort();
  else if (!watching) watch();
});

function offline(error) {
  history = [];
  for (const id of ["rate", "flash", "hits", "memory", "pressure"]) find(id).textContent = "-";
  find("requests").textContent = error instanceof Refused ? error.message : "the server isn't reached";
}

function show(state) {
  panel.state = state;
  showPlan(state);
  showFigures(state);
  panel.onState(state);
}

function showPlan(state) {
  const plan = state.plan;
  slider.disabled = !plan || plan.least_bytes >= plan.full_bytes;
  if (!plan) return;
  slider.max = STEPS;
  // What the user is choosing stands until the server has it.
  if (wanted === null && !sending) {
    const share = (plan.budget_bytes - plan.least_bytes) / Math.max(1, plan.full_bytes - plan.least_bytes);
    slider.value = Math.round(STEPS * share);
    showBudget(plan.budget_bytes, plan);
  }
  const rows = [];
  const parts = [];
  plan.parts.forEach((part, index) => {
    const mark = document.createElement("span");
    mark.className = `part part-${index}`;
    const name = document.createElement("dt");
    name.append(mark, part.name);
    const value = document.createElement("dd");
    value.textContent = bytes(part.bytes);
    rows.push(name, value);
    const piece = document.createElement("div");
    piece.className = `part-${index}`;
    piece.style.width = `${100 * part.bytes / Math.max(plan.total_bytes, plan.budget_bytes)}%`;
    parts.push(piece);
  });
  find("plan").replaceChildren(...rows);
  find("bar").replaceChildren(...parts);
}

function showBudget(value, plan) {
  const text = bytes(value) + (value >= plan.full_bytes ? ", all in memory" : "");
  find("budget-text").textContent = text;
  slider.setAttribute("aria-valuetext", text);
}

function showFigures(state) {
  const last = history.at(-1);
  // Totals begin anew with another model.
  if (last && (last.loaded !== state.loaded || last.flash_bytes_read > state.flash_bytes_read)) history = [];
  history.push(state);
  while (state.seconds - history[0].seconds > RATE_SECONDS) history.shift();
  const first = history[0];
  const seconds = state.seconds - first.seconds;
  const change = (name) => state[name] - first[name];
  const per = (name) => (seconds > 0 ? change(name) / seconds : 0);
  const lookups = change("cache_lookups");
  const rate = per("generated_tokens").toFixed(1);
  const flash = bytes(Math.round(per("flash_bytes_read")));
  const hits = lookups > 0 ? `${(100 * change("cache_hits") / lookups).toFixed(1)} %` : "-";
  find("rate").textContent = rate;
  find("flash").textContent = `${flash}/s, ${bytes(state.flash_bytes_read)} in all`;
  find("hits").textContent = hits;
  find("memory").textContent = bytes(state.memory_bytes);
  find("pressure").textContent = state.pressure || "-";
  find("requests").textContent = `${state.running} at work, ${state.waiting} waiting`;
  find("brief").textContent = `${rate} tokens/s, ${flash}/s from flash`;
}

slider.addEventListener("input", () => {
  const plan = panel.state.plan;
  wanted = plan.least_bytes + Math.round((plan.full_bytes - plan.least_bytes) * slider.value / STEPS);
  showBudget(wanted, plan);
  send();
});

// Sends the newest value; those that the slider passes meanwhile are left out.
async function send() {
  if (sending) return;
  sending = true;
  while (wanted !== null) {
    const value = wanted;
    wanted = null;
    try {
      show(await (await ask("/page/budget", { budget_bytes: value })).json());
      find("budget-error").textContent = "";
    } catch (error) {
      if (error instanceof Refused && error.status === 401) await panel.onKeyNeeded();
      find("budget-error").textContent = error.message;
    }
  }
  sending = false;
  if (panel.state) showPlan(panel.state);
}
