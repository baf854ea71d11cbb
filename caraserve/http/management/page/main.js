// Polls the server once a second while the page is visible, and gives each part its numbers.

import { AdapterTable } from "./adapters.js";
import { forgetKey, getJson, hasKey, reasonOf } from "./api.js";
import { Chat } from "./chat.js";
import { AdapterDialog } from "./manage.js";
import { ServerNumbers } from "./server.js";
import { Tabs } from "./tabs.js";
import { byId, setText } from "./text.js";
import { Upload } from "./upload.js";

const PAUSE_MS = 1000;
let latest = null;  // the newest numbers
let hasBegun = false;
let heardMs = 0;  // when they came

const chat = new Chat(() => table?.mark());
const numbers = new ServerNumbers();
const upload = new Upload(name => {
  table.refreshSoon();
  dialog.show(name);
});
const dialog = new AdapterDialog(() => mayChange(latest), () => table.refreshSoon());
let table = null;
const tabs = new Tabs(name => {
  if (latest === null) return;
  if (name === "server") {
    numbers.show();
    numbers.showUsage();
  } else if (name === "adapters") {
    table?.refreshSoon();
  }
});

byId("forget").addEventListener("click", () => {
  forgetKey();
  location.reload();
});

const mayChange = stats => stats.can_update && stats.client.admin;

function whyNot(stats) {
  if (!stats.can_update) return "Adapters cannot be uploaded or changed: start the server with --allow-runtime-lora-updating.";
  return stats.client.admin ? "" : "Uploads and changes need an admin's key.";
}

function showState(text, isBad) {
  setText("state", text);
  byId("state").classList.toggle("bad", isBad);
}

// Numbers of a server that no longer answers are marked as old.
function showGone(text) {
  showState(latest ? `${text}; the numbers are from ${new Date(heardMs).toLocaleTimeString()}` : text, true);
  document.body.classList.toggle("gone", latest !== null);
  numbers.forgetRate();
}

async function refresh() {
  if (document.hidden) return;
  const stats = await getJson("stats");
  [latest, heardMs] = [stats, Date.now()];
  document.body.classList.remove("gone");
  showState(stats.draining ? "stopping" : "serving", stats.draining);
  setText("model", `${stats.model} · ${stats.version}${stats.instance ? ` · instance ${stats.instance}` : ""}`);
  byId("forget").hidden = !hasKey();
  numbers.take(stats);
  if (tabs.shown === "server") numbers.show();
  if (tabs.shown === "server" && stats.instance !== null) await numbers.showInstances();
  if (hasBegun) return;
  upload.allow(whyNot(stats));
  table ??= new AdapterTable(chat.picker, () => tabs.shown === "adapters", name => dialog.show(name));
  if (tabs.shown === "server") numbers.showUsage();
  await chat.begin(stats);
  hasBegun = true;
}

async function poll() {
  try {
    await refresh();
  } catch (error) {
    showGone(reasonOf(error));
  }
  setTimeout(poll, PAUSE_MS);
}

poll();
