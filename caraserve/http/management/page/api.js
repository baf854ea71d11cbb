// Requests to this server. It is asked for its API key once, when a route first needs one; the tab keeps the key.

import { byId, setText } from "./text.js";

const KEY = "caraserve-api-key";
let asking = null;  // the promise of a key that is being typed

// The fields that the page reads; a server that lacks one is of another version.
const FIELDS = {
  "stats": [
    "model", "version", "instance", "draining", "running", "waiting", "kv_used_blocks", "kv_total_blocks",
    "computed_tokens", "first_token", "token_gap", "timeline", "loads"
  ],
  "stats/adapters": ["counts", "matching", "adapters"],
  "v1/cluster": ["name", "data"]
};

export async function getJson(path, query = {}) {
  const answer = await send(`${path}?${new URLSearchParams(query)}`);
  const document = await answer.json();
  const missing = (FIELDS[path] ?? []).find(name => !(name in document));
  if (missing) throw new Error(`the server is of another version (no ${missing}): load the page again`);
  return document;
}

export const tierOf = async name => (await (await send(`v1/adapters/${encodeURIComponent(name)}`)).json()).tier;

export const post = (path, body, signal) =>
  send(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

async function send(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    if (answer.status !== 401) {
      if (!answer.ok) throw new Error(await reason(answer));
      return answer;
    }
    await newKey(key);
  }
}

// The text of an error for the user; browsers have only "Failed to fetch", in words of their own, for a server that is gone.
export const reasonOf = error => error instanceof TypeError ? "the server is not reachable" : error.message;

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered with status ${answer.status}`;
  }
}

function newKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return Promise.resolve();  // another request has asked meanwhile
  setText("key-error", refused === null ? "" : "The server refused this key.");
  asking ??= new Promise(resolve => {
    const dialog = byId("key-dialog");
    dialog.addEventListener("close", () => {
      const key = byId("key").value.trim();
      byId("key").value = "";
      // A character beyond ASCII cannot be in a header; the server compares UTF-8.
      if (key) sessionStorage.setItem(KEY, String.fromCharCode(...new TextEncoder().encode(key)));
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

// Yields the lines of a stream of server-sent events that are not empty: "data: …", and comments ": …".
export async function* lines(answer) {
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const whole = rest.split("\n");
    rest = whole.pop();
    for (const line of whole) if (line) yield line;
    if (done) return;
  }
}
