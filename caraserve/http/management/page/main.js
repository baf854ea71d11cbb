// Polls the server once a second while the page is visible, and gives each part its numbers.

import { AdapterTable } from "./adapters.js";
import { getJson, reasonOf } from "./api.js";
import { Comparison } from "./compare.js";
import { byId, count, duration, element, setText } from "./text.js";
import { drawTimeline } from "./timeline.js";

const PAUSE_MS = 1000;
let before = null;  // tokens computed, and when
let hasNumbers = false;

const comparison = new Comparison(() => table?.mark());
let table = null;

function showState(text, isBad) {
  setText("state", text);
  byId("state").classList.toggle("bad", isBad);
}

// Numbers of a server that no longer answers are marked as old.
function showGone(text) {
  showState(`${text}; the numbers are old`, true);
  document.body.classList.add("gone");
  before = null;
}

function showNumbers(stats) {
  setText("model", `${stats.model} · ${stats.version}${stats.instance ? ` · instance ${stats.instance}` : ""}`);
  setText("running", count(stats.running));
  setText("waiting", count(stats.waiting));
  const share = stats.kv_total_blocks ? stats.kv_used_blocks / stats.kv_total_blocks : 0;
  setText("kv", `${(100 * share).toFixed(0)} %`);
  setText("kv-blocks", `${count(stats.kv_used_blocks)} of ${count(stats.kv_total_blocks)}`);
  setText("first50", duration(stats.first_token.p50_ms));
  setText("first95", duration(stats.first_token.p95_ms));
  setText("gap50", duration(stats.token_gap.p50_ms));
  setText("gap95", duration(stats.token_gap.p95_ms));
  const now = performance.now();
  if (before) setText("rate", count(Math.max(0, Math.round(1000 * (stats.computed_tokens - before.tokens) / (now - before.now)))));
  before = { tokens: stats.computed_tokens, now };
  hasNumbers = true;
  document.body.classList.remove("gone");
  showState(stats.draining ? "stopping" : "serving", stats.draining);
}

function showInstances({ name, data }) {
  byId("instances").replaceChildren(...data.map(member => {
    const line = element("tr"), load = member.load;
    const kv = load?.kv_tokens ? `${(100 * (1 - load.kv_free_tokens / load.kv_tokens)).toFixed(0)} %` : "";
    const heard = member.name === name ? "this one" : load ? `${load.age_s.toFixed(1)} s ago` : "never";
    line.append(
      element("td", "name", member.name), element("td", "", member.address),
      element("td", "", load ? `${member.state}, ${load.status}` : member.state),
      ...[load ? count(load.running) : "", load ? count(load.queued) : "", kv, heard].map(text => element("td", "number", text))
    );
    return line;
  }));
}

async function refresh() {
  if (document.hidden) return;
  const stats = await getJson("stats");
  showNumbers(stats);
  drawTimeline(stats.timeline, stats.loads);
  byId("instances-section").hidden = stats.instance === null;
  if (stats.instance !== null) showInstances(await getJson("v1/cluster"));
  if (table === null) {
    const { adapters } = await getJson("stats/adapters");
    comparison.begin(stats.model, adapters.map(adapter => adapter.name));
    table = new AdapterTable(comparison);
  }
}

async function poll() {
  try {
    await refresh();
  } catch (error) {
    if (hasNumbers) showGone(reasonOf(error));
    else showState(reasonOf(error), true);
  }
  setTimeout(poll, PAUSE_MS);
}

poll();
