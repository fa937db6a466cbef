// Requests to the server that this page came from, with its key where it has one.

const KEY = "ondevice-key";

export class Refused extends Error {
  constructor(status, { message, code }) {
    super(message);
    this.status = status;
    this.code = code || "";
  }
}

// A connection that broke off.
export class Lost extends Error {}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

// The response to a request. Throws Refused for an error, Lost where the server isn't reached.
export async function ask(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers["x-api-key"] = key;
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const content = body === undefined ? undefined : JSON.stringify(body);
  const response = await reached(fetch(path, { method, body: content, headers, signal }));
  if (response.ok) return response;
  throw new Refused(response.status, await fault(response));
}

async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Lost("the server isn't reached");
  }
}

async function fault(response) {
  try {
    return { message: `the server answered ${response.status}`, ...(await response.json()).error };
  } catch {
    return { message: `the server answered ${response.status}` };
  }
}

// The JSON of each server-sent event of a response. Throws Refused for an error among them,
// Lost where they break off.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reached(reader.read());
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Refused(500, event.error);
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
