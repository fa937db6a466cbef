// The memory budget as a slider, and the plan that it makes.

import { bytes, find, make } from "./elements.js";
import { keyNeeded, live, onLive, tellState } from "./live.js";
import { ask, Refused } from "./server.js";

// Positions of the slider, from the least budget to all that the model can use.
const STEPS = 200;
const slider = find("budget");
let wanted = null;
let sending = false;

onLive("state", showPlan);

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
  if (!find("speed").open) return;
  const most = Math.max(plan.total_bytes, plan.budget_bytes);
  const parts = plan.parts.map((part, at) => {
    const made = make("div", { className: `part-${at}` });
    made.style.width = `${(100 * part.bytes) / most}%`;
    return made;
  });
  const rows = plan.parts.flatMap((part, at) => [
    make("dt", {}, make("span", { className: `part part-${at}` }), part.name),
    make("dd", { textContent: bytes(part.bytes) }),
  ]);
  find("bar").replaceChildren(...parts);
  find("plan").replaceChildren(...rows);
}

function showBudget(value, plan) {
  const text = bytes(value) + (value >= plan.full_bytes ? ", all in memory" : "");
  find("budget-text").textContent = text;
  slider.setAttribute("aria-valuetext", text);
}

slider.addEventListener("input", () => {
  const plan = live.state.plan;
  wanted = plan.least_bytes + Math.round(((plan.full_bytes - plan.least_bytes) * slider.value) / STEPS);
  showBudget(wanted, plan);
  send();
});
find("speed").addEventListener("toggle", () => live.state && showPlan(live.state));

// Sends the newest value; those that the slider passes meanwhile are left out.
async function send() {
  if (sending) return;
  sending = true;
  while (wanted !== null) {
    const value = wanted;
    wanted = null;
    try {
      tellState(await (await ask("/page/budget", { budget_bytes: value })).json());
      find("budget-error").textContent = "";
    } catch (error) {
      if (error instanceof Refused && error.status === 401) await keyNeeded();
      find("budget-error").textContent = error.message;
    }
  }
  sending = false;
  if (live.state) showPlan(live.state);
}
