// Files that are put into the prompt: read as text, with their size in tokens.

import { bytes } from "./elements.js";
import { fenced } from "./prompt.js";
import { ask } from "./server.js";

// Bodies of requests have 2 MiB, in which JSON takes some more than the text.
const MAX_FILE_BYTES = 1_500_000;

// {name, text} of a file. Throws for one that is too large or no text.
export async function readFile(file) {
  if (file.size > MAX_FILE_BYTES) {
    throw new Error(
      `${file.name} has ${bytes(file.size)}, ${bytes(file.size - MAX_FILE_BYTES)} more than a request holds`,
    );
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is no text in UTF-8; models here read text alone`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is no text; models here read text alone`);
  return { name: file.name, text };
}

export async function countTokens(text, model, signal) {
  const body = { content: text, count: true, parse_special: false, model: model || undefined };
  return (await (await ask("/tokenize", body, signal)).json()).count;
}

export const fileTokens = (file, model) => countTokens(fenced(file.name, file.text), model);
