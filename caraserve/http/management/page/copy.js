// Copies texts, and shows those that are meant to be copied in a dialog.

import { button, byId, setText } from "./text.js";

const SAID_MS = 1500;

export function copyButton(text, label = "Copy") {
  const made = button("Copy", async () => {
    made.textContent = await copied(text()) ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = "Copy"; }, SAID_MS);
  }, label === "Copy" ? "" : label);
  return made;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

// Browsers have no clipboard for pages over plain HTTP from other machines.
function copiedBySelection(text) {
  const area = document.createElement("textarea"), before = document.activeElement;
  area.value = text;
  (before?.closest("dialog") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}

export function showText(title, text) {
  const dialog = byId("text-dialog");
  setText("text-title", title);
  setText("text", text);
  byId("text-buttons").replaceChildren(copyButton(() => text), button("Close", () => dialog.close()));
  dialog.showModal();
}
