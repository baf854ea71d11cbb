// The dialog of one adapter: what it is, and for admins its labels, pin, defaults, aliases, and its deletion.

import { adapterPath, aliasPath, change, getJson, reasonOf } from "./api.js";
import { copyButton } from "./copy.js";
import { button, byId, choices, count, element, facts, field, setText, size } from "./text.js";

const SAMPLING = [
  ["temperature", "Temperature"], ["max_tokens", "Max. tokens"], ["top_p", "Top p"], ["top_k", "Top k"], ["min_p", "Min p"],
  ["presence_penalty", "Presence penalty"], ["frequency_penalty", "Frequency penalty"], ["repetition_penalty", "Repetition penalty"]
];
const PINS = [["no", "no"], ["host", "in host memory"], ["device", "on the device"]];

export class AdapterDialog {
  #mayChange;
  #changed;
  #card = null;

  // `mayChange` says whether this client may change adapters; `changed` is called after a change.
  constructor(mayChange, changed) {
    [this.#mayChange, this.#changed] = [mayChange, changed];
    byId("adapter-close").addEventListener("click", () => byId("adapter-dialog").close());
  }

  async show(name) {
    setText("adapter-title", name);
    setText("adapter-said", "");
    byId("adapter-parts").replaceChildren();
    if (!byId("adapter-dialog").open) byId("adapter-dialog").showModal();
    await this.#try(async () => {
      const [card, aliases] = await Promise.all([getJson(adapterPath(name)), getJson("v1/aliases")]);
      this.#card = card;
      const parts = [this.#facts(), this.#aliases(aliases.data.filter(({ adapter }) => adapter === name))];
      if (this.#mayChange()) parts.splice(1, 0, this.#settings());
      if (this.#mayChange()) parts.push(this.#deletion());
      byId("adapter-parts").replaceChildren(...parts);
    });
  }

  // Runs a change, and says what came of it.
  async #try(action) {
    try {
      byId("adapter-said").className = "soft";
      setText("adapter-said", await action() ?? "");
      return true;
    } catch (error) {
      byId("adapter-said").className = "bad";
      setText("adapter-said", reasonOf(error));
      return false;
    }
  }

  async #change(method, path, body, done, headers) {
    const name = this.#card.name;
    if (!await this.#try(() => change(method, path, body, headers))) return;
    this.#changed();
    await this.show(name);
    setText("adapter-said", done);
  }

  #facts() {
    const card = this.#card, raw = element("pre", "", JSON.stringify(card, null, 2));
    raw.tabIndex = 0;
    const base = card.trained_on ? `${card.trained_on}${card.other_base ? ", which is not the served model" : ""}` : "not named in its files";
    const modules = card.target_modules.length ? card.target_modules.join(", ") : "known to the instance that stores it";
    return element("section", "",
      facts([
        ["tier", card.tier], ["rank", String(card.rank)], ["size", size(card.bytes)], ["modules", modules], ["trained on", base],
        ["registered", new Date(1000 * card.created).toLocaleString()], ["requests under way", count(card.requests)]
      ]),
      element("p", "digest", "Version (digest): ", element("code", "", card.digest || "known when the upload is complete"), " ",
        ...(card.digest ? [copyButton(() => card.digest, "Copy the digest")] : [])),
      element("details", "", element("summary", "", `All that GET /v1/adapters/${card.name} says`), raw));
  }

  #settings() {
    const { labels, pinned, sampling, stop, chat_template } = this.#card;
    const written = Object.entries(labels).map(([label, value]) => `${label}=${value}`).join("\n");
    const [labelNode, labelField] = field("textarea", "Labels, one on a line", { rows: 2, placeholder: "team=search", value: written, spellcheck: false });
    const [pinNode, pinField] = field("select", "Pinned");
    const numbers = SAMPLING.map(([name, label]) =>
      [name, ...field("input", label, { type: "number", step: "any", placeholder: "none", value: sampling?.[name] ?? "" })]);
    const [stopNode, stopField] = field("textarea", "Stop strings, one on a line", { rows: 2, value: (stop ?? []).join("\n"), spellcheck: false });
    const [templateNode, templateField] = field("textarea", "Chat template (Jinja)", { rows: 4, value: chat_template ?? "", spellcheck: false });
    choices(pinField, PINS, pinned ?? "no");
    const form = element("form", "", element("h3", "", "Settings"), labelNode, pinNode, element("details", "",
      element("summary", "", "Defaults of requests that leave these out"),
      element("div", "numbers", ...numbers.map(([, node]) => node)), stopNode, templateNode), element("button", "", "Save"));
    form.addEventListener("submit", event => {
      event.preventDefault();
      const values = numbers.filter(([, , input]) => input.value !== "").map(([name, , input]) => [name, input.valueAsNumber]);
      const pairs = linesOf(labelField).map(line => [line.split("=")[0].trim(), line.split("=").slice(1).join("=").trim()]);
      this.#change("PATCH", adapterPath(this.#card.name), {
        labels: Object.fromEntries(pairs), pinned: pinField.value, stop: orNull(linesOf(stopField)),
        sampling: values.length ? Object.fromEntries(values) : null, chat_template: templateField.value || null
      }, "Saved.", this.#ifMatch());
    });
    return form;
  }

  // A change is for the version that is shown.
  #ifMatch() { return this.#card.digest ? { "If-Match": `"${this.#card.digest}"` } : {}; }

  #aliases(aliases) {
    const rows = aliases.map(({ name, previous }) => element("li", "", element("code", "", name), ...(this.#mayChange() ? [
      ...(previous ? [button(`Back to ${previous}`, () => this.#change("POST", `${aliasPath(name)}/rollback`, undefined, `${name} stands for ${previous} again.`), `Roll ${name} back to ${previous}`)] : []),
      button("Delete", () => this.#change("DELETE", aliasPath(name), undefined, `The alias ${name} is deleted.`), `Delete the alias ${name}`)
    ] : [])));
    const part = element("section", "", element("h3", "", "Aliases"), rows.length
      ? element("ul", "rows", ...rows) : element("p", "soft", "No alias stands for this adapter."));
    if (!this.#mayChange()) return part;
    const [node, input] = field("input", "Name of an alias that shall stand for it", { required: true, maxLength: 128, autocomplete: "off", spellcheck: false });
    const form = element("form", "line", node, element("button", "", "Set"));
    form.addEventListener("submit", event => {
      event.preventDefault();
      const name = input.value.trim();
      this.#change("PUT", aliasPath(name), { adapter: this.#card.name }, `${name} stands for ${this.#card.name}.`);
    });
    part.append(form);
    return part;
  }

  #deletion() {
    const part = element("section"), name = this.#card.name;
    const ask = (text, query) => {
      const sure = button(text, () => this.#delete(query, ask));
      sure.className = "danger";
      part.replaceChildren(
        element("p", "soft", "Uploaded files are deleted; a folder that was not uploaded stays on the disk, but is not served."),
        element("div", "actions", sure, button("Keep it", () => part.replaceWith(this.#deletion()))));
      sure.focus();
    };
    part.append(button("Delete …", () => ask(`Delete ${name}`, "")));
    return part;
  }

  async #delete(query, ask) {
    const name = this.#card.name;
    const isDone = await this.#try(async () => {
      try {
        await change("DELETE", adapterPath(name) + query, undefined, this.#ifMatch());
      } catch (error) {
        if (error.code === "adapter_aliased") ask(`Delete ${name} and its aliases`, "?force=true");
        throw error;
      }
    });
    if (!isDone) return;
    this.#changed();
    byId("adapter-dialog").close();
  }
}

const linesOf = area => area.value.split("\n").map(line => line.trim()).filter(Boolean);
const orNull = list => list.length ? list : null;
