// What a chat becomes in a request: its messages, with the files that were dropped into them, and its settings.

// The text of a question, its files before it.
export function questionText(message) {
  const files = (message.files || []).map((file) => fenced(file.name, file.text));
  return [...files, message.content].filter(Boolean).join("\n\n");
}

// A file between fences that are longer than any in it.
export function fenced(name, text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((it) => it[0].length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

export function requestMessages(messages, settings) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return [...system, ...messages.map(requestMessage)];
}

function requestMessage(message) {
  if (message.role === "user") return { role: "user", content: questionText(message) };
  if (message.role === "tool")
    return { role: "tool", content: message.content, tool_call_id: message.callId, name: message.name };
  const made = { role: "assistant", content: message.content };
  if (message.thinking) made.reasoning_content = message.thinking;
  if (message.calls?.length) {
    made.tool_calls = message.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return made;
}

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];

// The fields of a request that a chat's settings set. What they leave open is as the model's authors recommend.
export function requestOptions(settings) {
  const options = {};
  for (const name of NUMBERS) if (settings[name]) options[name] = Number(settings[name]);
  if (settings.think) options.chat_template_kwargs = { enable_thinking: settings.think === "on" };
  if (settings.schema) {
    options.response_format = {
      type: "json_schema",
      json_schema: { name: "reply", schema: JSON.parse(settings.schema) },
    };
  }
  if (settings.tools) options.tools = JSON.parse(settings.tools);
  return options;
}
