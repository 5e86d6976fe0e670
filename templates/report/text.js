// Elements and numbers. Whatever a run has written becomes a text node here, never markup.

function put(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === "") continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  return put(element, children);
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return put(element, children);
}

const byId = (id) => document.getElementById(id);
const known = (value) => typeof value === "number" && Number.isFinite(value);

// 0.613, 12.4, 1.2e-6; a dash where there is no value.
function number(value, digits = 3) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e6)) return signed(value.toExponential(1));
  const places = size >= 100 ? Math.min(1, digits) : size >= 10 ? Math.min(2, digits) : digits;
  return signed(value.toFixed(Number.isInteger(value) && size >= 10 ? 0 : places));
}

const signed = (text) => text.replaceAll("-", "−");
const withSign = (value, digits = 3) => (known(value) && value > 0 ? "+" : "") + number(value, digits);

// 980, 2.1k, 3.4M.
function count(value) {
  if (!known(value)) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return (value / size).toFixed(1) + unit;
  }
  return value.toFixed(0);
}

const grouped = (value) => value.toLocaleString("en-GB");
const plural = (value, word) => `${grouped(value)} ${word}${value === 1 ? "" : "s"}`;
const percent = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)} %` : "–");

// 7:32, 1:02:03.
function duration(seconds) {
  const all = Math.max(0, Math.round(seconds));
  const two = (part) => String(part).padStart(2, "0");
  const [hours, minutes] = [Math.floor(all / 3600), Math.floor(all / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
}

function moment(time) {
  if (!known(time)) return "–";
  const date = new Date(time * 1000);
  return date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

// Call `work` once calls of it have stopped for `pause` milliseconds.
function settled(work, pause) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, pause);
  };
}

function table(heads, rows, attributes = {}) {
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((cell) => (cell instanceof Node ? make("td", {}, cell) : make("td", {}, cell)))),
  );
  const head = make("tr", {}, ...heads.map((name) => make("th", { scope: "col" }, name)));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": attributes.label },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}
