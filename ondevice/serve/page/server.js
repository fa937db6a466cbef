// Requests to the server that this page came from, with its key where it has one.

const KEY = "ondevice-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

// The response to a request. Throws Refused for an error, and what `fetch` throws.
export async function ask(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers["x-api-key"] = key;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
  });
  if (response.ok) return response;
  throw new Refused(response.status, await reason(response));
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// The JSON of each server-sent event of a response. Throws Refused for an error among them.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Refused(500, event.error.message);
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
