// The part of the page with conversations: the prompt, who answers, and which conversation is shown.

import { adapterPath, getJson } from "./api.js";
import { newConversation } from "./conversation.js";
import { History } from "./history.js";
import { Picker } from "./picker.js";
import { Settings } from "./settings.js";
import { byId, setText } from "./text.js";
import { Thread } from "./thread.js";

const WIDE = "(min-width: 1100px)";  // there is room for all panels; else one stands in place of the conversation
const NEAR_END = 120;  // pixels: who is as near to the end of the conversation sees what is added
const PANELS = ["history", "settings"];
const EXAMPLE = "Tell me about the sea.";

export class Chat {
  #history = new History(conversation => this.#open(conversation));
  #settings = new Settings(() => this.#note(), () => this.#panel("settings", true));
  #running = new Set();  // threads
  #thread = null;
  #base = null;
  #width = matchMedia(WIDE);

  constructor(chosen) {
    this.picker = new Picker(() => {
      this.#note();
      chosen();
    });
    byId("new").addEventListener("click", () => {
      this.#open(null);
      byId("prompt").focus();
    });
    for (const name of PANELS) {
      byId(`show-${name}`).addEventListener("click", () => this.#panel(name, byId(name).hidden));
    }
    this.#width.addEventListener("change", () => this.#panels());
    this.#panels();
    byId("composer").addEventListener("submit", event => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", event => {
      const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
      if (!sends && !(event.key === "Enter" && (event.ctrlKey || event.metaKey))) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("stop").addEventListener("click", () => {
      this.#thread.stop();
      byId("prompt").focus();
    });
    byId("example").addEventListener("click", () => {
      byId("prompt").value = EXAMPLE;
      byId("composer").requestSubmit();
    });
    addEventListener("pagehide", () => { if (this.#thread?.isRunning) this.#history.keep(this.#thread.conversation); });
  }

  // Begins when the server's numbers are there: with the conversation that was changed last, or a new one.
  async begin(stats) {
    this.#base = stats.model;
    this.picker.base = { name: stats.model, mayUse: stats.client.base_model };
    this.#settings.limit(stats.max_model_len, stats.can_chat);
    const newest = this.#history.newest();
    if (newest) {
      this.#open(newest);
    } else {
      this.#show(newConversation(await this.#firstNames(stats), this.#settings.values));
    }
  }

  // The base model, and the adapter of the README where it is.
  async #firstNames(stats) {
    const { adapters } = await getJson("stats/adapters", { contains: "pirate" });
    const names = [...(stats.client.base_model ? [stats.model] : []), ...adapters.map(({ name }) => name).filter(name => name === "pirate")];
    return names.length ? names : (await getJson("stats/adapters")).adapters.slice(0, 1).map(({ name }) => name);
  }

  #open(conversation) {
    this.#show(conversation ?? newConversation(this.picker.names, this.#settings.values));
  }

  #show(conversation) {
    const { names, settings } = conversation;
    this.#thread = [...this.#running].find(thread => thread.conversation.id === conversation.id) ?? null;
    this.#settings.values = settings;
    this.#thread ??= new Thread(conversation, {
      settings: this.#settings, names: () => this.picker.names, origins: names => this.#origins(names),
      changed: thread => this.#changed(thread), say: text => setText("said", text)
    });
    this.picker.names = names;
    byId("thread").replaceChildren(this.#thread.node);
    this.#changed(this.#thread);
    if (!this.#width.matches) this.#panels();
    this.#toEnd();
  }

  #toEnd() { byId("turns").scrollTop = byId("turns").scrollHeight; }

  async #send() {
    const text = byId("prompt").value, thread = this.#thread;
    if (!text.trim() || !thread || thread.isRunning) return;
    const sending = thread.send(text);
    if (!thread.isRunning) return;  // a setting is wrong
    byId("prompt").value = "";
    byId("prompt").focus();
    this.#toEnd();
    await sending;
  }

  // A thread has begun or ended its answers.
  #changed(thread) {
    if (thread.isRunning) this.#running.add(thread);
    else this.#running.delete(thread);
    this.#history.keep(thread.conversation);
    this.#history.show(this.#thread.conversation.id);
    const { isRunning, conversation } = this.#thread;
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    byId("empty").hidden = conversation.turns.length > 0;
    this.#follow();
  }

  // Keeps the end in sight while answers grow.
  #follow() {
    if (!this.#thread.isRunning || this.#isFollowing) return;
    this.#isFollowing = true;
    const turns = byId("turns");
    let height = turns.scrollHeight;
    const look = () => {
      if (turns.scrollHeight > height && height - turns.clientHeight - turns.scrollTop < NEAR_END) this.#toEnd();
      height = turns.scrollHeight;
      this.#isFollowing = this.#thread.isRunning;
      if (this.#isFollowing) setTimeout(look, 100);
    };
    look();
  }

  #isFollowing = false;

  // Settings and names belong to the conversation.
  #note() {
    if (!this.#thread) return;
    this.#thread.conversation.names = this.picker.names;
    this.#thread.conversation.settings = this.#settings.values;
    byId("send").disabled = this.picker.names.length === 0;
  }

  // Where each of these is just before a prompt is sent.
  async #origins(names) {
    let aliases = [];
    try {
      aliases = (await getJson("v1/aliases")).data;
    } catch { /* the answers will say what is wrong */ }
    return Promise.all(names.map(async name => {
      const alias = aliases.find(one => one.name === name);
      if (name === this.#base) return "base model";
      if (/[*+]/.test(name)) return "combination";
      try {
        const { tier } = await getJson(adapterPath(alias?.adapter ?? name));
        return alias ? `${alias.adapter}, from ${tier}` : `from ${tier}`;
      } catch {
        return "tier unknown";
      }
    }));
  }

  #panels() {
    for (const name of PANELS) this.#panel(name, this.#width.matches);
  }

  #panel(name, isShown) {
    if (isShown && !this.#width.matches) for (const other of PANELS) this.#set(other, false);
    this.#set(name, isShown);
  }

  #set(name, isShown) {
    byId(name).hidden = !isShown;
    byId(`show-${name}`).setAttribute("aria-expanded", String(isShown));
  }
}
