// The three parts of the page, one of which is shown. The address has its name, so that a reload shows it again.

import { byId } from "./text.js";

const NAMES = ["chat", "adapters", "server"];

export class Tabs {
  #changed;

  constructor(changed) {
    this.#changed = changed;
    for (const name of NAMES) {
      byId(`tab-${name}`).addEventListener("click", () => this.show(name));
      byId(`tab-${name}`).addEventListener("keydown", event => this.#move(name, event));
    }
    addEventListener("hashchange", () => this.show(location.hash.slice(1)));
    this.show(location.hash.slice(1));
  }

  show(name) {
    this.shown = NAMES.includes(name) ? name : NAMES[0];
    for (const one of NAMES) {
      const tab = byId(`tab-${one}`), isShown = one === this.shown;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
      byId(`panel-${one}`).hidden = !isShown;
    }
    document.body.dataset.shown = this.shown;
    if (location.hash.slice(1) !== this.shown && (location.hash || this.shown !== NAMES[0])) {
      history.replaceState(null, "", `#${this.shown}`);
    }
    this.#changed(this.shown);
  }

  #move(name, event) {
    const at = NAMES.indexOf(name), last = NAMES.length - 1;
    const places = { ArrowLeft: at ? at - 1 : last, ArrowRight: at < last ? at + 1 : 0, Home: 0, End: last };
    if (!(event.key in places)) return;
    event.preventDefault();
    this.show(NAMES[places[event.key]]);
    byId(`tab-${this.shown}`).focus();
  }
}
