// What the figures share: text with powers, fields with their sliders and messages, copying, the state in the address.

const $ = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const pieces = (text) => text.split(/\^\{([^}]*)\}/);

// A text in which 2^{-24} is a power: raised for eyes, and 2^-24 for ears and when it is copied.
function rich(text) {
  return pieces(text).map((piece, i) => {
    const caret = element("span", { class: "caret" }, "^");
    return i % 2 ? element("sup", {}, caret, piece) : piece;
  });
}

const nodes = (part) => (typeof part === "string" ? rich(part) : [part]);

// Replace what an element says, by lines of texts and elements.
function say(id, ...lines) {
  $(id).replaceChildren(...lines.map((line) => element("p", {}, ...[line].flat().flatMap(nodes))));
}

// Fields.

const allFields = () => [...document.querySelectorAll("main input:not([type=range]), main select")];
const fieldsOf = (prefix) => allFields().filter(({ id }) => id.startsWith(`${prefix}-`));

// Say what is wrong with a field, or that nothing is; a figure that shows older values is pale.
function complain(input, message) {
  input.setAttribute("aria-invalid", String(Boolean(message)));
  $(`${input.id}-error`).textContent = message;
  const section = input.closest("section");
  const isStale = section.querySelector("[aria-invalid=true]") !== null;
  section.querySelector(".figure").classList.toggle("stale", isStale);
}

function checkedNumber(input) {
  const { min, max, whole } = input.dataset;
  const x = parseNumber(input.value);
  const kind = whole === undefined ? "a number" : "a whole number";
  const fits = x >= parseNumber(min) && x <= parseNumber(max) && (whole === undefined || Number.isInteger(x));
  if (!fits) throw new RangeError(`“${input.value}” does not fit: give ${kind} from ${min} to ${max}.`);
  return x;
}

// The number in a field, or null where there is none that fits, which is said elsewhere.
function numberOf(input) {
  try {
    return checkedNumber(input);
  } catch (error) {
    if (error instanceof RangeError) return null;
    throw error;
  }
}

function checkedList(input) {
  const { max } = input.dataset;
  const items = input.value.split(/[\s,]+/).filter(Boolean).map(Number);
  if (items.some((item) => !Number.isInteger(item) || item < 0 || item > Number(max))) {
    throw new RangeError(`“${input.value}” is no list of whole numbers from 0 to ${max}, such as 3, 12.`);
  }
  return items;
}

function checkedValue(input) {
  if (input.type === "checkbox") return input.checked;
  if (input.tagName === "SELECT") return input.value;
  if (input.dataset.free !== undefined) return input.value; // its figure reads it
  return input.dataset.list === undefined ? checkedNumber(input) : checkedList(input);
}

// The values of fields by the rest of their names, or null where one is wrong, which is said beside it.
function read(prefix) {
  const found = {};
  let good = true;
  for (const input of fieldsOf(prefix)) {
    try {
      found[input.id.slice(prefix.length + 1)] = checkedValue(input);
      if (input.type === "text") complain(input, "");
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      complain(input, error.message);
      good = false;
    }
  }
  return good ? found : null;
}

function give(id, value) {
  const input = $(id);
  if (input.type === "checkbox") input.checked = value;
  else input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
}

// The position of a slider is the number, or its exponent of 2 where the field is marked with data-log.
const positionOf = (x, log) => (log ? Math.log2(x) : x);

function numberAt(position, log) {
  if (!log) return String(position);
  return Number.isInteger(position) ? `2^${position}` : String(Number((2 ** position).toPrecision(3)));
}

function addSlider(input) {
  const { min, max, step, log } = input.dataset;
  const isLog = log !== undefined;
  const end = (text) => positionOf(parseNumber(text), isLog);
  const slider = element("input", { type: "range", id: `${input.id}-slider`, "aria-labelledby": `${input.id}-label`,
    min: end(min), max: end(max), step });
  const follow = () => {
    const x = numberOf(input);
    if (x === null) return;
    slider.value = positionOf(x, isLog);
    slider.setAttribute("aria-valuetext", input.value);
  };
  slider.addEventListener("input", () => give(input.id, numberAt(Number(slider.value), isLog)));
  input.addEventListener("input", follow);
  input.closest(".box").prepend(slider);
  follow();
}

// Arrow keys in a number field step it, as its slider's would.
function stepByKeys(input) {
  input.addEventListener("keydown", (event) => {
    const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    const { min, max, step, log } = input.dataset;
    if (!way || step === undefined) return;
    event.preventDefault();
    const x = numberOf(input);
    const next = log === undefined ? Number((x + way * Number(step)).toPrecision(12)) : x * 2 ** way;
    if (x !== null && next >= parseNumber(min) && next <= parseNumber(max)) give(input.id, String(next));
  });
}

function addMessage(input) {
  input.setAttribute("aria-describedby", `${input.id}-error`);
  input.closest(".field").append(element("p", { class: "error", id: `${input.id}-error`, role: "alert" }));
}

function startFields() {
  for (const input of allFields().filter(({ type }) => type === "text")) {
    for (const [key, value] of [["autocomplete", "off"], ["autocapitalize", "off"], ["spellcheck", "false"]]) {
      input.setAttribute(key, value);
    }
    addMessage(input);
    stepByKeys(input);
    if (input.dataset.slider !== undefined) addSlider(input);
  }
}

function fillSelect(id, names, chosen) {
  $(id).append(...names.map((name) => new Option(name, name, name === chosen, name === chosen)));
}

function presets(holder, entries, choose) {
  for (const [name, value] of entries) {
    const button = element("button", { type: "button" }, ...rich(name));
    button.addEventListener("click", () => choose(value));
    $(holder).append(button);
  }
}

// Draw a figure again when one of its fields changes.
function onChange(prefix, show) {
  for (const input of fieldsOf(prefix)) input.addEventListener("input", show);
}

// Copying.

function copyByHand(text) {
  const area = element("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // an old browser, or no permission
    done = copyByHand(text);
  }
  button.dataset.label ??= button.textContent;
  button.textContent = done ? "Copied" : "Not allowed";
  $("notice").textContent = done ? "Copied." : `The browser does not allow copying; here it is: ${text}`;
  $("notice").classList.toggle("unseen", done);
  button.focus();
  setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
}

// The address: #section?field=value&..., of the fields that differ from how the page opens.

const stateOf = (input) => (input.type === "checkbox" ? String(input.checked) : input.value);
let opening = {};
let saving = null;

function address(section) {
  const changed = allFields().filter((input) => stateOf(input) !== opening[input.id]);
  const query = new URLSearchParams(changed.map((input) => [input.id, stateOf(input)])).toString();
  const hash = `${section}${query && `?${query}`}`;
  return `${location.href.split("#")[0]}${hash && `#${hash}`}`;
}

const sectionNow = () => location.hash.slice(1).split("?")[0];

function saveState() {
  clearTimeout(saving);
  saving = setTimeout(() => history.replaceState(null, "", address(sectionNow())), 200); // browsers limit how often
}

function setState(input, text) {
  if (stateOf(input) === text) return true;
  if (input.tagName === "SELECT" && ![...input.options].some(({ value }) => value === text)) return false;
  if (input.type === "checkbox" && !["true", "false"].includes(text)) return false;
  give(input.id, input.type === "checkbox" ? text === "true" : text);
  return true;
}

function restoreState() {
  clearTimeout(saving);
  const [section, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
  if (location.hash && !query && $(section)) { // a link to a section leaves the fields alone
    saveState();
    return;
  }
  const wanted = { ...opening, ...Object.fromEntries(new URLSearchParams(query)) };
  const strange = Object.entries(wanted).filter(([id, text]) => !(id in opening) || !setState($(id), text));
  $("notice").textContent = strange.length
    ? `This link has settings that the page does not know: ${strange.map(([id, text]) => `${id}=${text}`).join(", ")}.` : "";
  $("notice").classList.toggle("unseen", !strange.length);
  $(section)?.scrollIntoView();
}

function startAddress() {
  opening = Object.fromEntries(allFields().map((input) => [input.id, stateOf(input)]));
  document.querySelector("main").addEventListener("input", saveState);
  addEventListener("hashchange", restoreState);
  for (const section of document.querySelectorAll("main section")) {
    const button = element("button", { type: "button", class: "link",
      "aria-label": `Copy a link to “${section.querySelector("h2").textContent}” as it is set now` }, "Copy link");
    button.addEventListener("click", () => copy(address(section.id), button));
    section.querySelector("h2").after(button);
  }
  restoreState();
}
