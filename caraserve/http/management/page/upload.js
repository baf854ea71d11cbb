// Sends the folder of an adapter to the server: chosen, or dropped on the page.

import { adapterPath, Refusal, reasonOf, upload } from "./api.js";
import { tarOf } from "./tar.js";
import { byId, element, setText, size } from "./text.js";

// What the server stores of a folder; the configuration comes before the tensors.
const NEEDED = ["adapter_config.json", "adapter_model.safetensors"];
const ALSO = ["chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "added_tokens.json"];

export class Upload {
  #files = [];
  #running = null;  // the AbortController of an upload under way
  #done;

  // `done` is called with the name of an adapter that was stored.
  constructor(done) {
    this.#done = done;
    byId("upload-folder").addEventListener("change", event => this.#take([...event.target.files]));
    byId("upload-files").addEventListener("change", event => this.#take([...event.target.files]));
    const place = byId("upload-form");
    place.addEventListener("dragover", event => {
      event.preventDefault();
      place.classList.add("over");
    });
    place.addEventListener("dragleave", () => place.classList.remove("over"));
    place.addEventListener("drop", async event => {
      event.preventDefault();
      place.classList.remove("over");
      const entries = [...event.dataTransfer.items].map(item => item.webkitGetAsEntry?.()).filter(Boolean);
      this.#take((await Promise.all(entries.map(filesIn))).flat());
    });
    place.addEventListener("submit", event => {
      event.preventDefault();
      this.#send();
    });
    byId("upload-stop").addEventListener("click", () => this.#running?.abort());
  }

  // `reason`: why this client may upload nothing, or "".
  allow(reason) {
    byId("upload-form").hidden = Boolean(reason);
    setText("upload-refused", reason);
  }

  // Keeps the adapter's files of those that were chosen: from the top of a folder, not from checkpoints in it.
  #take(files) {
    const depth = file => file.webkitRelativePath.split("/").length, least = Math.min(...files.map(depth));
    const found = files.filter(file => depth(file) === least);
    this.#files = [...NEEDED, ...ALSO].map(name => found.find(file => file.name === name)).filter(Boolean);
    const missing = NEEDED.filter(name => !this.#files.some(file => file.name === name));
    byId("upload-chosen").replaceChildren(...this.#files.map(file => element("li", "", `${file.name}, ${size(file.size)}`)));
    this.#say(missing.length ? `${missing.join(" and ")} ${missing.length > 1 ? "are" : "is"} not among the ${files.length} files` : "", missing.length > 0);
    const folder = found[0]?.webkitRelativePath.split("/")[0];
    if (folder && !byId("upload-name").value) byId("upload-name").value = folder.replace(/[^\w.:-]/g, "-").slice(0, 128);
    byId("upload-send").disabled = missing.length > 0;
  }

  async #send() {
    if (this.#running || byId("upload-send").disabled) return;
    const name = byId("upload-name").value.trim(), replaces = byId("upload-replace").checked, bar = byId("upload-progress");
    this.#running = new AbortController();
    byId("upload-stop").hidden = bar.hidden = false;
    bar.value = 0;
    this.#say("sending …");
    try {
      const path = adapterPath(name) + (replaces ? "?force=true" : "");
      const card = await upload(path, tarOf(this.#files), replaces ? {} : { "If-None-Match": "*" }, part => {
        bar.value = part;
        this.#say(part < 1 ? `sending: ${Math.floor(100 * part)} %` : "the server checks every tensor …");
      }, this.#running.signal);
      this.#say(`${name} is served. Its version is ${card.digest}.`);
      this.#done(name);
    } catch (error) {
      const exists = error instanceof Refusal && error.status === 412;
      this.#say(exists ? `There is an adapter ${name}: choose another name, or tick the box.` : reasonOf(error), true);
    }
    this.#running = null;
    byId("upload-stop").hidden = bar.hidden = true;
  }

  #say(text, isBad = false) {
    setText("upload-said", text);
    byId("upload-said").className = isBad ? "bad" : "soft";
  }
}

// The files in a dropped folder's top, each with its path, or a dropped file.
async function filesIn(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => { entry.file(resolve, reject); })];
  const reader = entry.createReader(), found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => { reader.readEntries(resolve, reject); });
    if (!some.length) break;
    found.push(...some.filter(one => one.isFile));
  }
  return (await Promise.all(found.map(filesIn))).flat();
}
