// A request as a command or a program that sends the same.

import { hasKey } from "./api.js";

const KEY = "CARASERVE_API_KEY";  // the environment variable with the key, which is in no text

// Fields that the client's function takes by name; it sends others with extra_body.
const NAMED = new Set([
  "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop",
  "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"
]);
const ONLY_IN_CHATS = new Set(["tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"]);

export function curl(path, body) {
  const parts = [`curl -N ${quoted(new URL(path, document.baseURI).href)}`, `-H 'Content-Type: application/json'`];
  if (hasKey()) parts.push(`-H "Authorization: Bearer $${KEY}"`);
  parts.push(`-d ${quoted(JSON.stringify({ ...body, stream: true }, null, 2))}`);
  return parts.join(" \\\n  ");
}

const quoted = text => `'${text.replaceAll("'", `'\\''`)}'`;  // for a POSIX shell

export function python(path, body) {
  const isChat = path.endsWith("chat/completions");
  const isNamed = ([name]) => NAMED.has(name) && (isChat || !ONLY_IN_CHATS.has(name));
  const all = Object.entries(body), named = all.filter(isNamed), others = all.filter(pair => !isNamed(pair));
  if (others.length) named.push(["extra_body", Object.fromEntries(others)]);
  const key = hasKey() ? `os.environ["${KEY}"]` : `"none"`, address = new URL("v1", document.baseURI).href;
  return `${hasKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(address)}, api_key=${key})
stream = client.${isChat ? "chat.completions" : "completions"}.create(
${named.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("")}    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(${isChat ? `chunk.choices[0].delta.content or ""` : "chunk.choices[0].text"}, end="", flush=True)
print()
`;
}

// A value as Python writes it.
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `, parts = Array.isArray(value)
    ? value.map(one => literal(one, inner))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, inner)}`);
  const [begin, end] = Array.isArray(value) ? "[]" : "{}", line = begin + parts.join(", ") + end;
  return line.length < 90 && !line.includes("\n") ? line : `${begin}\n${parts.map(part => `${inner}${part},\n`).join("")}${indent}${end}`;
}
