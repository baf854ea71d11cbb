// Chooses who answers: a field that searches adapters by name, and the names that are chosen, beside the prompt.

import { getJson } from "./api.js";
import { button, byId, count, element, setText } from "./text.js";

const MOST = 8, SHOWN = 50, TYPING_MS = 150;

export class Picker {
  #names = [];
  #base = { name: null, mayUse: false };
  #changed;
  #options = [];  // {name, note} that are listed
  #active = -1;
  #asked = 0;
  #timer = null;

  constructor(changed) {
    this.#changed = changed;
    const input = byId("picker");
    input.addEventListener("input", () => this.#later(TYPING_MS));
    input.addEventListener("click", () => this.#later(0));
    input.addEventListener("keydown", event => this.#press(event));
    input.addEventListener("blur", () => this.#close());
    byId("options").addEventListener("pointerdown", event => event.preventDefault());  // the field keeps the focus
    byId("options").addEventListener("click", event => {
      const at = [...byId("options").children].indexOf(event.target.closest("[role=option]"));
      if (at !== -1) this.#choose(at);
    });
  }

  get names() { return [...this.#names]; }

  get isFull() { return this.#names.length >= MOST; }

  set base(base) { this.#base = base; }

  set names(names) {
    this.#names = [...new Set(names)].slice(0, MOST);
    byId("chosen").replaceChildren(...this.#names.map(name => element("li", "", name, button("×", () => {
      this.remove(name);
      byId("picker").focus();  // the button is gone
    }, `Leave out ${name}`))));
    this.#changed();
  }

  add(name) { if (!this.isFull) this.names = [...this.#names, name]; }

  remove(name) { this.names = this.#names.filter(one => one !== name); }

  #press(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in moves) {
      event.preventDefault();
      if (byId("options").hidden) this.#later(0);
      else this.#activate((this.#active + moves[event.key] + this.#options.length) % this.#options.length);
    } else if (event.key === "Enter" && !event.isComposing) {
      event.preventDefault();  // it would send the prompt
      if (this.#active !== -1) this.#choose(this.#active);
    } else if (event.key === "Escape" && !byId("options").hidden) {
      event.preventDefault();
      this.#close();
    } else if (event.key === "Backspace" && !byId("picker").value && this.#names.length) {
      this.remove(this.#names.at(-1));
    }
  }

  #later(ms) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#search(), ms);
  }

  async #search() {
    const asked = ++this.#asked, contains = byId("picker").value.trim();
    const [found, aliases] = await Promise.all([this.#adapters(contains), this.#aliases(contains)]);
    if (asked !== this.#asked || document.activeElement !== byId("picker")) return;
    const { name: base, mayUse } = this.#base, lower = contains.toLowerCase();
    const options = mayUse && base?.toLowerCase().includes(lower) ? [{ name: base, note: "base model" }] : [];
    options.push(...aliases, ...found.adapters.map(({ name, tier, rank }) => ({ name, note: `${tier}, rank ${rank}` })));
    // Names that no list has: combinations, sql*0.7+legal*0.3, and other names of the base model.
    if (contains && !options.some(({ name }) => name === contains)) options.push({ name: contains, note: "as it is written" });
    const shown = options.slice(0, SHOWN), left = found.matching + options.length - found.adapters.length - shown.length;
    this.#open(shown, left);
  }

  async #adapters(contains) {
    try {
      return await getJson("stats/adapters", { contains: contains.slice(0, 200) });
    } catch {
      return { adapters: [], matching: 0 };  // the state of the server is named elsewhere
    }
  }

  async #aliases(contains) {
    try {
      const all = (await getJson("v1/aliases")).data.filter(({ name }) => name.toLowerCase().includes(contains.toLowerCase()));
      return all.slice(0, 10).map(({ name, adapter }) => ({ name, note: `alias of ${adapter}` }));
    } catch {
      return [];
    }
  }

  #open(options, left) {
    this.#options = options;
    byId("options").replaceChildren(...options.map(({ name, note }, at) => {
      const option = element("li", "", element("span", "", name), element("span", "soft", note));
      option.id = `option-${at}`;
      option.setAttribute("role", "option");
      return option;
    }));
    this.#mark();
    byId("options").hidden = options.length === 0;
    byId("picker").setAttribute("aria-expanded", String(options.length > 0));
    this.#activate(byId("picker").value.trim() ? 0 : -1);
    setText("picker-note", left > 0 ? `${count(left)} more: type a part of the name` : "");
  }

  #mark() {
    for (const [at, option] of [...byId("options").children].entries()) {
      const isChosen = this.#names.includes(this.#options[at].name);
      option.setAttribute("aria-selected", String(isChosen));
      option.setAttribute("aria-disabled", String(this.isFull && !isChosen));
    }
  }

  #activate(at) {
    this.#active = at;
    const input = byId("picker");
    for (const option of byId("options").children) option.classList.toggle("active", option.id === `option-${at}`);
    if (at < 0) {
      input.removeAttribute("aria-activedescendant");
    } else {
      input.setAttribute("aria-activedescendant", `option-${at}`);
      byId(`option-${at}`)?.scrollIntoView({ block: "nearest" });
    }
  }

  #choose(at) {
    const { name } = this.#options[at];
    if (this.#names.includes(name)) this.remove(name);
    else this.add(name);
    if (byId("picker").value) {
      byId("picker").value = "";
      this.#later(0);
    }
    this.#mark();
  }

  #close() {
    this.#asked++;
    clearTimeout(this.#timer);
    byId("options").hidden = true;
    byId("picker").setAttribute("aria-expanded", "false");
    this.#activate(-1);
    setText("picker-note", "");
  }
}
