// Has the server write a reply into a message, and goes on where the connection breaks.

import { live, untilReached } from "./live.js";
import { requestMessages, requestOptions } from "./prompt.js";
import { ask, events, Lost } from "./server.js";

const RATE_SECONDS = 3;
const MAX_FAILURES = 3;

// Why a reply may end: "stop", "length" (its own limit or the context's), "tool_calls", "stopped", "failed".
// `message.reason` is empty while it is written, and where the page was closed meanwhile.

// Writes into `message`, the reply behind the messages `before` it; goes on with what it has already.
// tell(kind, value): "waiting"; "reading", a progress; "writing", {tokens, rate}; "lost", while the server is.
export async function write(message, before, settings, model, signal, tell) {
  message.reason = message.error = "";
  let failures = 0;
  for (;;) {
    const length = message.content.length + (message.thinking || "").length;
    try {
      tell("waiting");
      await new Stream(message, tell).read(before, settings, model, signal);
      return;
    } catch (error) {
      const grown = message.content.length + (message.thinking || "").length > length;
      failures = grown ? 1 : failures + 1;
      if (signal.aborted) {
        message.reason = "stopped";
        return;
      }
      if (!isLost(error) || failures > MAX_FAILURES) {
        message.reason = "failed";
        message.error = error.message;
        throw error;
      }
    }
    tell("lost");
    // What obeys a schema can't be continued.
    if (settings.schema) message.content = message.thinking = "";
    try {
      await untilReached(signal);
    } catch {
      message.reason = "stopped";
      return;
    }
  }
}

// Whether the server is gone, for a while perhaps.
function isLost(error) {
  return error instanceof Lost || error.code === "server_stopping";
}

// One answer of the server.
class Stream {
  constructor(message, tell) {
    this.message = message;
    this.tell = tell;
    this.begun = performance.now();
    this.first = 0;
    this.times = [];
    this.counted = 0;
    this.usage = null;
    this.calls = [];
  }

  async read(before, settings, model, signal) {
    const isBegun = Boolean(this.message.content || this.message.thinking);
    const body = {
      ...requestOptions(settings),
      model: model || undefined,
      messages: requestMessages(isBegun ? [...before, this.message] : before, settings),
      stream: true,
      stream_options: { include_usage: true },
      return_progress: true,
    };
    if (isBegun) body.continue_final_message = true;
    try {
      const response = await ask("/v1/chat/completions", body, signal);
      for await (const event of events(response)) this.take(event, settings);
      if (!this.message.reason) throw new Lost("the connection was lost");
    } finally {
      // A call that isn't complete is none.
      if (this.message.reason !== "tool_calls") delete this.message.calls;
      this.note();
    }
  }

  take(event, settings) {
    if (event.usage) this.usage = event.usage;
    if (event.prompt_progress) {
      this.progress = event.prompt_progress;
      this.tell("reading", event.prompt_progress);
      return;
    }
    const choice = event.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (content || thought || calls) this.count();
    if (content) this.message.content += content;
    if (thought) this.message.thinking = (this.message.thinking || "") + thought;
    for (const call of calls || []) this.takeCall(call);
    if (choice.finish_reason) this.end(choice.finish_reason, settings);
    this.tell("writing", { tokens: this.counted, rate: this.rate });
  }

  takeCall(call) {
    const known = (this.calls[call.index] ||= { id: call.id, name: call.function.name, arguments: "" });
    known.arguments += call.function.arguments || "";
    this.message.calls = this.calls.filter(Boolean);
  }

  end(reason, settings) {
    this.message.reason = reason;
    this.message.limit = reason === "length" && Number(settings.max_tokens) <= this.counted + 1 ? "set" : "";
  }

  count() {
    const now = performance.now();
    this.first ||= now;
    this.counted += 1;
    this.times.push(now);
    while (now - this.times[0] > 1000 * RATE_SECONDS) this.times.shift();
  }

  // Tokens a second of late, by the pieces that came: each is a token, as far as tokens are whole characters.
  get rate() {
    const seconds = (this.times.at(-1) - this.times[0]) / 1000;
    return seconds > 0 ? (this.times.length - 1) / seconds : 0;
  }

  // Notes in the message what it took.
  note() {
    const tokens = this.usage?.completion_tokens ?? this.counted;
    const prompt = this.usage?.prompt_tokens ?? this.progress?.total ?? 0;
    const seconds = this.first ? (performance.now() - this.first) / 1000 : 0;
    const facts = this.message.facts || { tokens: 0, seconds: 0 };
    this.message.facts = {
      prompt,
      context: prompt + tokens,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? this.progress?.cache ?? 0,
      tokens: facts.tokens + tokens,
      seconds: facts.seconds + seconds,
      first: this.first ? (this.first - this.begun) / 1000 : 0,
    };
    this.message.model = live.state?.loaded || "";
  }
}
