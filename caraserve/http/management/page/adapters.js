// The table of adapters. The server filters and sorts, and sends at most 100 of however many there are.

import { getJson, reasonOf } from "./api.js";
import { button, byId, count, element, setText, size } from "./text.js";

const TIERS = ["", "device", "host", "disk", "peer", "upload", "loading"];
const PAUSE_MS = 2000, TYPING_MS = 200;
const MANY = 2000, MANY_PAUSE_MS = 10000;  // the server looks at every adapter, which takes 0.1 s for 20,000

export class AdapterTable {
  #picker;
  #isShown;
  #open;
  #rows = new Map();
  #labels = new Map();
  #tier = "";
  #timer = null;
  #asked = 0;
  #refused = "";
  #pauseMs = PAUSE_MS;

  // `isShown` says whether the table is in sight; `open` is called with the name of an adapter to look at.
  constructor(picker, isShown, open) {
    [this.#picker, this.#isShown, this.#open] = [picker, isShown, open];
    byId("contains").addEventListener("input", () => this.#later(TYPING_MS));
    for (const tier of TIERS) {
      const label = element("label"), input = element("input"), text = element("span", "", tier || "all");
      Object.assign(input, { type: "radio", name: "tier", value: tier, checked: tier === "" });
      input.addEventListener("change", () => {
        this.#tier = tier;
        this.#later(0);
      });
      label.append(input, " ", text);
      this.#labels.set(tier, text);
      byId("tiers").append(label);
    }
    this.#later(0);
  }

  // Shows which adapters are chosen, after a change elsewhere.
  mark() {
    const names = this.#picker.names;
    for (const [name, row] of this.#rows) {
      row.box.checked = names.includes(name);
      row.box.disabled = this.#picker.isFull && !row.box.checked;
    }
  }

  refreshSoon() { this.#later(0); }

  async #refresh() {
    if (document.hidden || !this.#isShown()) return this.#later(this.#pauseMs);
    const asked = ++this.#asked;
    try {
      const found = await getJson("stats/adapters", { contains: byId("contains").value, tier: this.#tier });
      if (asked === this.#asked) this.#show(found);
    } catch (error) {
      setText("shown", reasonOf(error));
    }
    if (asked === this.#asked) this.#later(this.#pauseMs);
    return undefined;
  }

  #later(ms) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#refresh(), ms);
  }

  #show({ counts, matching, adapters, refused }) {
    this.#showRefused(refused);
    let all = 0;
    for (const tier of TIERS.slice(1)) {
      this.#labels.get(tier).textContent = `${tier} ${count(counts[tier])}`;
      if (tier !== "loading") all += counts[tier];
    }
    this.#labels.get("").textContent = `all ${count(all)}`;
    this.#pauseMs = all > MANY ? MANY_PAUSE_MS : PAUSE_MS;
    const rows = new Map(adapters.map(adapter => [adapter.name, this.#row(adapter)]));
    const body = byId("adapters"), old = this.#rows;
    this.#rows = rows;
    const isSame = [...rows.keys()].join() === [...old.keys()].join();
    const keeps = body.contains(document.activeElement) && [...old.keys()].every(name => rows.has(name));
    // Moving a row would take the focus from its box, so a table in use keeps its order.
    if (keeps) body.append(...[...rows].filter(([name]) => !old.has(name)).map(([, row]) => row.line));
    else if (!isSame) body.replaceChildren(...[...rows.values()].map(row => row.line));
    const isFiltered = Boolean(this.#tier || byId("contains").value);
    const more = matching > adapters.length ? `${adapters.length} of ${count(matching)}: filter by name` : "";
    setText("shown", more || (isFiltered ? `${count(matching)} of ${count(all)} match` : all ? "" : "There are no adapters."));
    this.mark();
  }

  #showRefused({ matching, folders }) {
    const more = matching > folders.length ? `, of which these are the first ${folders.length}` : "";
    setText("refused-count", `${count(matching)} folder${matching === 1 ? " is" : "s are"} not served${more}`);
    byId("refused-part").hidden = matching === 0;
    const shown = JSON.stringify(folders);
    if (shown === this.#refused) return;  // a list that is made again loses what is selected in it
    this.#refused = shown;
    byId("refused").replaceChildren(...folders.map(({ name, reason }) => element("li", "", `${name}: ${reason}`)));
  }

  #row(adapter) {
    const { name, rank, num_bytes, tier, loading, layers, pinned, labels, requests, per_minute } = adapter;
    const row = this.#rows.get(name) ?? this.#newRow(name);
    const progress = loading && layers ? `${loading}, ${layers[0]} of ${layers[1]} layers` : loading ?? "";
    const settings = Object.entries(labels).map(([label, value]) => value ? `${label}=${value}` : label);
    if (adapter.num_classes) settings.unshift(`classifies: ${adapter.num_classes}`);
    if (adapter.own_chat_template) settings.unshift("own chat template");
    if (pinned) settings.unshift(`pinned in ${pinned}`);
    if (adapter.trained_on) settings.unshift(`trained on another base: ${adapter.trained_on}`);
    const rate = per_minute ? per_minute.toFixed(1) : "";
    const texts = [tier, String(rank), size(num_bytes), rate, requests || "", progress, settings.join(", ")];
    texts.forEach((text, at) => {
      if (row.cells[at].textContent !== String(text)) row.cells[at].textContent = text;
    });
    return row;
  }

  #newRow(name) {
    const line = element("tr"), box = element("input");
    box.type = "checkbox";
    box.setAttribute("aria-label", `${name} answers in the chat`);
    box.addEventListener("change", () => box.checked ? this.#picker.add(name) : this.#picker.remove(name));
    const cells = ["", "number", "number", "number", "number", "", ""].map(kind => element("td", kind));
    const open = button(name, () => this.#open(name));
    open.className = "link";
    line.append(element("td", "", box), element("td", "name", open), ...cells);
    return { line, box, cells };
  }
}
