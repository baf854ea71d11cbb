// Elements and numbers as text. Whatever a server says, names and answers above all, becomes text and never markup.

export const byId = id => document.getElementById(id);

export const setText = (id, text) => { byId(id).textContent = text; };

// An element with children, which are elements or texts.
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function button(text, onClick, label = "") {
  const made = element("button", "", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

// A field with a label before it, which wraps both: [the label, the field]. `settings` are properties of the field.
export function field(tag, label, settings = {}) {
  const made = element(tag);
  Object.assign(made, settings);
  return [element("label", "field", element("span", "", label), made), made];
}

export function choices(select, options, chosen = select.value) {
  select.replaceChildren(...options.map(([value, text]) => {
    const option = element("option", "", text);
    option.value = value;
    return option;
  }));
  select.value = options.some(([value]) => value === chosen) ? chosen : options[0][0];
}

// A list of facts, pairs of a name and a text.
export function facts(pairs) {
  return element("dl", "", ...pairs.map(([name, text]) => element("div", "", element("dt", "", name), element("dd", "", text))));
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${bytes.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

export const count = number => number.toLocaleString("en");

export const counted = (number, one, several = `${one}s`) => `${count(number)} ${number === 1 ? one : several}`;
