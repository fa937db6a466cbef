// Follows the server's state while the page can be seen, and tells who wants to know.

import { ask, events, Lost, Refused } from "./server.js";

const RETRY_SECONDS = [1, 2, 5];
const listeners = { state: [], lost: [], keyNeeded: [] };
let watching = null;

export const live = { state: null };

// kind: "state", with the newest state; "lost", with the error; "keyNeeded", which waits until there is one.
export function onLive(kind, listener) {
  listeners[kind].push(listener);
}

export function tellState(state) {
  live.state = state;
  for (const listener of listeners.state) listener(state);
}

export async function keyNeeded() {
  for (const listener of listeners.keyNeeded) await listener();
}

export async function watch() {
  let failures = 0;
  while (!document.hidden) {
    watching = new AbortController();
    try {
      for await (const state of events(await ask("/page/live", undefined, watching.signal))) {
        failures = 0;
        tellState(state);
      }
      throw new Lost("the server isn't reached");
    } catch (error) {
      if (document.hidden) break;
      for (const listener of listeners.lost) listener(error);
      if (error instanceof Refused && error.status === 401) await keyNeeded();
      else await pause(RETRY_SECONDS[Math.min(failures, RETRY_SECONDS.length - 1)]);
      failures += 1;
    }
  }
  watching = null;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) watching?.abort();
  else if (!watching) watch();
});

// Resolves once the server answers. Rejects as `fetch` does when the signal says so.
export async function untilReached(signal) {
  for (let tries = 0; ; tries += 1) {
    signal.throwIfAborted();
    try {
      await ask("/health", undefined, signal);
      return;
    } catch (error) {
      if (error.name === "AbortError") throw error;
      await pause(RETRY_SECONDS[Math.min(tries, RETRY_SECONDS.length - 1)], signal);
    }
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        reject(signal.reason);
      },
      { once: true },
    );
  });
}
