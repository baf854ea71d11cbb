// Requests to this server. It is asked for its API key once, when a route first needs one; the tab keeps the key.

import { byId, setText } from "./text.js";

const KEY = "caraserve-api-key";
let asking = null;  // the promise of a key that is being typed

// The fields that the page reads; a server that lacks one is of another version.
const FIELDS = {
  "stats": [
    "model", "version", "instance", "draining", "running", "waiting", "kv_used_blocks", "kv_total_blocks",
    "computed_tokens", "first_token", "token_gap", "timeline", "loads", "max_model_len", "can_chat", "can_update",
    "client"
  ],
  "stats/adapters": ["counts", "matching", "adapters"],
  "v1/cluster": ["name", "data"],
  "v1/usage": ["since", "data"]
};

// An answer that says no: its message, the status and the code.
export class Refusal extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export const forgetKey = () => sessionStorage.removeItem(KEY);

export const adapterPath = name => `v1/adapters/${encodeURIComponent(name)}`;

export const aliasPath = name => `v1/aliases/${encodeURIComponent(name)}`;

export async function getJson(path, query = {}) {
  const answer = await send(`${path}?${new URLSearchParams(query)}`);
  const document = await answer.json();
  const missing = (FIELDS[path] ?? []).find(name => !(name in document));
  if (missing) throw new Error(`the server is of another version (no ${missing}): load the page again`);
  return document;
}

export const getText = async path => (await send(path)).text();

export const post = (path, body, signal) => send(path, { ...asJson("POST", body), signal });

// Changes something and returns what the server says about it.
export const change = async (method, path, body, headers = {}) =>
  (await send(path, asJson(method, body, headers))).json();

function asJson(method, body, headers = {}) {
  if (body === undefined) return { method, headers };
  return { method, headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify(body) };
}

const withKey = headers => hasKey() ? { ...headers, Authorization: `Bearer ${sessionStorage.getItem(KEY)}` } : headers;

async function send(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const answer = await fetch(path, { ...options, headers: withKey(options.headers), credentials: "omit", cache: "no-store" });
    if (answer.status !== 401) {
      if (!answer.ok) throw refusal(answer.status, await answer.text());
      return answer;
    }
    await newKey(key);
  }
}

// Sends a file; `progress` gets the part that has been sent, from 0 to 1. Only XMLHttpRequest tells that.
export function upload(path, file, headers, progress, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", path);
    for (const [name, value] of Object.entries(withKey(headers))) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", event => progress(event.total ? event.loaded / event.total : 0));
    request.addEventListener("load", () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(refusal(request.status, request.responseText));
    });
    request.addEventListener("error", () => reject(new TypeError("the connection ended")));
    request.addEventListener("abort", () => reject(new Error("stopped: nothing was stored")));
    signal.addEventListener("abort", () => request.abort());
    request.send(file);
  });
}

// The text of an error for the user; browsers have only "Failed to fetch", in words of their own, for a server that is gone.
export const reasonOf = error => error instanceof TypeError ? "the server is not reachable" : error.message;

function refusal(status, text) {
  try {
    const { message, code } = JSON.parse(text).error;
    return new Refusal(message, status, code);
  } catch {
    return new Refusal(`the server answered with status ${status}`, status, null);
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
