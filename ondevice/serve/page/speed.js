// The quiet line under the chat, which says what the model does, and the figures and plots that it opens to.

import { bytes, find, number, seconds, tokenWords } from "./elements.js";
import { onLive } from "./live.js";
import { Plot, PLOT_SECONDS } from "./plot.js";
import { Refused } from "./server.js";

const RATE_SECONDS = 3;
const line = find("line");
const bar = find("reading");
const plots = [
  ["Budget", bytes, (it) => it.plan?.budget_bytes || 0],
  ["Tokens a second", (value) => value.toFixed(1), (it) => it.rates.generated_tokens],
  ["Read from flash", (value) => `${bytes(Math.round(value))}/s`, (it) => it.rates.flash_bytes_read],
].map(([name, shown, value]) => ({ plot: new Plot(name, shown), value }));

let history = [];
let lost = "";
let phase = { kind: "idle" };

find("plots").append(...plots.map((it) => it.plot.figure));
onLive("state", take);
onLive("lost", (error) => {
  history = [];
  lost = error instanceof Refused ? error.message : "The server isn't reached. Trying again.";
  show();
});

// kind: "idle", "waiting", "reading", "writing" or "lost", as `write` of reply.js tells them.
export function setPhase(kind, value) {
  phase = { kind, value };
  show();
}

function take(state) {
  lost = "";
  const last = history.at(-1);
  // Totals begin anew with another model.
  if (last && (last.loaded !== state.loaded || last.flash_bytes_read > state.flash_bytes_read)) history = [];
  const first = history.find((it) => state.seconds - it.seconds <= RATE_SECONDS) || state;
  const per = (name) => (state[name] - first[name]) / Math.max(1e-3, state.seconds - first.seconds);
  const rates =
    first === state
      ? { generated_tokens: 0, flash_bytes_read: 0 }
      : { generated_tokens: per("generated_tokens"), flash_bytes_read: per("flash_bytes_read") };
  history.push({ ...state, rates });
  while (state.seconds - history[0].seconds > PLOT_SECONDS) history.shift();
  show();
  if (find("speed").open) showFigures();
}

function show() {
  line.textContent = phase.kind === "lost" ? words() : lost || words();
  bar.hidden = phase.kind !== "reading" || Boolean(lost);
  if (bar.hidden) return;
  bar.max = phase.value.total;
  bar.value = phase.value.processed;
}

function words() {
  const { kind, value } = phase;
  if (kind === "waiting") return "Waiting for the model.";
  if (kind === "lost") return "The server isn't reached. The reply goes on once it is.";
  if (kind === "reading") return reading(value);
  const held = memoryWords();
  if (kind === "idle") return held;
  const rate = value.rate ? `${value.rate.toFixed(1)} tokens/s` : "Writing";
  return [rate, tokenWords(value.tokens), ...(held ? [held] : [])].join(" · ");
}

function reading({ processed, total, cache, time_ms: time }) {
  const read = `Reading ${number(processed)} of ${number(total)} tokens`;
  const done = processed - cache;
  if (done <= 0 || time < 300 || processed >= total) return read;
  return `${read} · ${seconds((((total - processed) / done) * time) / 1000)} left`;
}

// What the budget holds.
function memoryWords() {
  const state = history.at(-1);
  if (!state) return "";
  if (!state.plan) return state.loaded ? "" : "No model is loaded yet.";
  const { budget_bytes: budget, flash_bytes: flash } = state.plan;
  const parts = [
    flash ? `${bytes(budget)} of memory, ${bytes(flash)} on flash` : `${bytes(budget)}, all in memory`,
  ];
  if (state.draft_tokens) parts.push(`${percent(state.accepted_tokens, state.draft_tokens)} of drafts accepted`);
  return parts.join(" · ");
}

const percent = (part, all) => `${((100 * part) / all).toFixed(0)} %`;

function showFigures() {
  const state = history.at(-1);
  if (!state) return;
  for (const { plot, value } of plots) plot.draw(history.map((it) => [it.seconds, value(it)]));
  const first = history[0];
  const lookups = state.cache_lookups - first.cache_lookups;
  const figures = {
    flash: `${bytes(state.flash_bytes_read)} in all`,
    hits: lookups > 0 ? percent(state.cache_hits - first.cache_hits, lookups) : "-",
    drafts: state.draft_tokens ? `${number(state.accepted_tokens)} of ${number(state.draft_tokens)}` : "-",
    memory: bytes(state.memory_bytes),
    pressure: state.pressure || "-",
    requests: `${state.running} at work, ${state.waiting} waiting`,
  };
  for (const [id, text] of Object.entries(figures)) find(id).textContent = text;
}

find("speed").addEventListener("toggle", showFigures);
