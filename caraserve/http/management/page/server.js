// The numbers of the server: load, times, instances, and who has used how much.

import { getJson, getText, hasKey, reasonOf } from "./api.js";
import { showText } from "./copy.js";
import { byId, count, duration, element, setText } from "./text.js";
import { drawTimeline } from "./timeline.js";

const MOST_ROWS = 100;

export class ServerNumbers {
  #latest = null;
  #before = null;  // tokens computed, and when

  constructor() {
    for (const change of [matchMedia("(prefers-color-scheme: dark)"), window]) {
      change.addEventListener(change === window ? "resize" : "change", () => this.#drawTimeline());
    }
    byId("usage-refresh").addEventListener("click", () => this.showUsage());
    byId("metrics").addEventListener("click", async event => {
      if (!hasKey()) return;  // the link works as it is
      event.preventDefault();
      try {
        showText("Metrics", await getText("metrics"));
      } catch (error) {
        showText("Metrics", reasonOf(error));
      }
    });
  }

  // Notes new numbers.
  take(stats) {
    const now = performance.now(), before = this.#before;
    if (before) setText("rate", count(Math.max(0, Math.round(1000 * (stats.computed_tokens - before.tokens) / (now - before.now)))));
    this.#before = { tokens: stats.computed_tokens, now };
    this.#latest = stats;
  }

  // Shows the newest numbers.
  show() {
    const stats = this.#latest;
    setText("running", count(stats.running));
    setText("waiting", count(stats.waiting));
    const share = stats.kv_total_blocks ? stats.kv_used_blocks / stats.kv_total_blocks : 0;
    setText("kv", `${(100 * share).toFixed(0)} %`);
    setText("kv-blocks", `${count(stats.kv_used_blocks)} of ${count(stats.kv_total_blocks)}`);
    setText("first50", duration(stats.first_token.p50_ms));
    setText("first95", duration(stats.first_token.p95_ms));
    setText("gap50", duration(stats.token_gap.p50_ms));
    setText("gap95", duration(stats.token_gap.p95_ms));
    byId("instances-section").hidden = stats.instance === null;
    this.#drawTimeline();
  }

  // A canvas that is not in sight has no width.
  #drawTimeline() {
    if (this.#latest && byId("timeline").clientWidth) drawTimeline(this.#latest.timeline, this.#latest.loads);
  }

  forgetRate() { this.#before = null; }

  async showInstances() {
    const { name, data } = await getJson("v1/cluster");
    byId("instances").replaceChildren(...data.map(member => instanceRow(member, name)));
  }

  // Once, and on demand: a server may have used 100,000 pairs of clients and adapters.
  async showUsage() {
    try {
      const { since, data } = await getJson("v1/usage");
      const rows = data.sort((one, other) => other.output_tokens - one.output_tokens).slice(0, MOST_ROWS);
      byId("usage").replaceChildren(...rows.map(usageRow));
      const shown = data.length > rows.length ? ` The ${MOST_ROWS} with the most tokens of ${count(data.length)}.` : "";
      setText("usage-since", `Of this instance, since ${new Date(1000 * since).toLocaleString()}.${shown}`);
    } catch (error) {
      setText("usage-since", reasonOf(error));
    }
  }
}

function instanceRow(member, own) {
  const load = member.load, heard = member.name === own ? "this one" : load ? `${load.age_s.toFixed(1)} s ago` : "never";
  const kv = load?.kv_tokens ? `${(100 * (1 - load.kv_free_tokens / load.kv_tokens)).toFixed(0)} %` : "";
  return element("tr", "",
    element("td", "name", member.name), element("td", "", member.address),
    element("td", "", load ? `${member.state}, ${load.status}` : member.state),
    ...[load ? count(load.running) : "", load ? count(load.queued) : "", kv, heard].map(text => element("td", "number", text)));
}

function usageRow({ client, adapter, requests, prompt_tokens, cached_tokens, output_tokens, failures }) {
  const numbers = [requests, prompt_tokens, cached_tokens, output_tokens, failures];
  return element("tr", "", element("td", "name", client), element("td", "name", adapter ?? "base model"),
    ...numbers.map(number => element("td", "number", count(number))));
}
