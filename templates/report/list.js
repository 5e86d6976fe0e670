// The list of rollouts: filtered and ordered as a row of numbers, of which only those in sight are elements.

const ROW = 54;
const SPARE = 6;

const ORDERS = {
  newest: ({ index }) => (a, b) => index[b] - index[a] || a - b,
  oldest: ({ index }) => (a, b) => index[a] - index[b] || a - b,
  best: ({ reward }) => (a, b) => reward[b] - reward[a] || a - b,
  worst: ({ reward }) => (a, b) => reward[a] - reward[b] || a - b,
  longest: ({ sampled }) => (a, b) => sampled[b] - sampled[a] || a - b,
  different: ({ difference }) => (a, b) => (difference[b] ?? -1) - (difference[a] ?? -1) || a - b,
};

class RolloutList {
  constructor(rollouts, open) {
    Object.assign(this, { rollouts, open });
    this.list = byId("list");
    this.rows = byId("rows");
    this.shown = [];
    this.chosen = -1;
    this.elements = new Map();
    this.range = extent(rollouts.columns.reward);
    this.list.addEventListener("scroll", () => this.paint(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest("[data-place]");
      if (row) this.choose(Number(row.dataset.place), true);
    });
    new ResizeObserver(() => this.paint()).observe(this.list);
  }

  // Show `rows`, the numbers of rollouts, from the top.
  show(rows) {
    const chosen = this.shown[this.chosen];
    this.shown = rows;
    this.chosen = chosen === undefined ? -1 : rows.indexOf(chosen);
    this.rows.style.height = `${rows.length * ROW}px`;
    this.list.scrollTop = 0;
    for (const element of this.elements.values()) element.remove();
    this.elements.clear();
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - SPARE);
    const last = Math.min(this.shown.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / ROW) + SPARE);
    for (const [place, element] of this.elements) {
      if (place >= first && place < last) continue;
      element.remove();
      this.elements.delete(place);
    }
    for (let place = first; place < last; place++) {
      if (!this.elements.has(place)) this.elements.set(place, this.rows.appendChild(this.row(place)));
      this.elements.get(place).setAttribute("aria-selected", String(place === this.chosen));
    }
    const active = this.elements.get(this.chosen);
    if (active) this.list.setAttribute("aria-activedescendant", active.id);
    else this.list.removeAttribute("aria-activedescendant");
  }

  row(place) {
    const { columns } = this.rollouts;
    const row = this.shown[place];
    const reward = columns.reward[row];
    const fill = make("i");
    const [low, high] = this.range;
    fill.style.width = `${high > low ? (100 * (reward - low)) / (high - low) : 100}%`;
    const element = make("div", {
      class: "row", role: "option", id: `row-${place}`, "data-place": place,
      "aria-posinset": place + 1, "aria-setsize": this.shown.length,
    },
    make("span", { class: "name" }, columns.id[row]),
    make("span", { class: "where" }, `step ${columns.index[row] + 1} · ${columns.environment[row]} · ${plural(columns.sampled[row], "token")}`),
    make("span", { class: "reward" }, number(reward)),
    make("span", { class: "bar", "aria-hidden": "true" }, fill),
    make("span", { class: "answer" }, columns.prompt[row] ? make("span", { class: "asked" }, `${columns.prompt[row].slice(-40)} → `) : "", columns.answer[row]));
    element.style.transform = `translateY(${place * ROW}px)`;
    return element;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const last = this.shown.length - 1;
    const to = {
      ArrowDown: this.chosen + 1, ArrowUp: this.chosen - 1, PageDown: this.chosen + page,
      PageUp: this.chosen - page, Home: 0, End: last, Enter: this.chosen,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, to)), event.key === "Enter");
  }

  // Choose the rollout at `place` of the list. `enter`: also go there, where it covers the list.
  choose(place, enter) {
    this.chosen = place;
    const top = place * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    else if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
    this.paint();
    this.open(this.shown[place], enter);
  }

  step(by) {
    const to = this.chosen + by;
    if (to >= 0 && to < this.shown.length) this.choose(to, true);
  }

  // Mark a rollout that was opened from elsewhere.
  follow(row) {
    this.chosen = this.shown.indexOf(row);
    if (this.chosen >= 0) {
      const top = this.chosen * ROW;
      if (top < this.list.scrollTop || top + ROW > this.list.scrollTop + this.list.clientHeight) {
        this.list.scrollTop = Math.max(0, top - this.list.clientHeight / 2);
      }
    }
    this.paint();
  }
}

function extent(values) {
  let [low, high] = [0, 0];
  values.forEach((value, place) => {
    [low, high] = place ? [Math.min(low, value), Math.max(high, value)] : [value, value];
  });
  return [low, high];
}

// The form over the list. A text is looked for in all tokens, chunk by chunk.
class Filters {
  constructor(rollouts, list) {
    Object.assign(this, { rollouts, list, search: 0 });
    const { columns } = rollouts;
    const names = [...new Set(columns.environment)].sort();
    byId("filter-environment").append(make("option", { value: "" }, names.length > 1 ? "all" : names[0] ?? "all"),
      ...(names.length > 1 ? names.map((name) => make("option", { value: `=${name}` }, name)) : []));
    const form = byId("filters");
    const apply = settled(() => this.apply(), 120);
    form.addEventListener("input", apply);
    form.addEventListener("reset", () => setTimeout(() => this.apply()));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Whether each row fulfils all but the text.
  condition() {
    const { columns } = this.rollouts;
    const limit = (id, other) => {
      const field = byId(id);
      return field.value === "" || Number.isNaN(field.valueAsNumber) ? other : field.valueAsNumber;
    };
    const [fromStep, toStep] = [limit("filter-step-from", -Infinity), limit("filter-step-to", Infinity)];
    const [fromReward, toReward] = [limit("filter-reward-from", -Infinity), limit("filter-reward-to", Infinity)];
    const environment = byId("filter-environment").value.slice(1);
    return (row) => {
      const [step, reward] = [columns.index[row] + 1, columns.reward[row]];
      return step >= fromStep && step <= toStep && reward >= fromReward && reward <= toReward &&
        (!environment || columns.environment[row] === environment);
    };
  }

  async apply() {
    const search = ++this.search;
    const words = byId("filter-text").value.trim().toLowerCase();
    const fits = this.condition();
    if (!words) {
      const rows = [];
      for (let row = 0; row < this.rollouts.count; row++) if (fits(row)) rows.push(row);
      return this.show(rows);
    }
    const found = [];
    let shown = performance.now();
    for (let chunk = 0; chunk < this.rollouts.chunks; chunk++) {
      await this.rollouts.makeSearchable(chunk);
      if (search !== this.search) return;
      for (const row of this.rollouts.rowsOf[chunk]) if (fits(row) && this.says(row, words)) found.push(row);
      if (performance.now() - shown > 200) {
        this.show([...found], (chunk + 1) / this.rollouts.chunks);
        shown = performance.now();
      }
    }
    this.show(found);
  }

  says(row, words) {
    return this.rollouts.texts[row].includes(words) || this.rollouts.columns.id[row].startsWith(words);
  }

  show(rows, part = 1) {
    rows.sort(ORDERS[byId("filter-order").value](this.rollouts.columns));
    this.list.show(rows);
    const { left_out: leftOut } = overview.rollouts;
    const older = leftOut ? `; ${plural(leftOut, "older one")} are in the run's folder` : "";
    const searching = part < 1 ? ` so far, ${percent(part)} searched` : "";
    const mean = rows.length ? `, mean reward ${number(rows.reduce((sum, row) => sum + this.rollouts.columns.reward[row], 0) / rows.length)}` : "";
    byId("found").textContent = `${grouped(rows.length)} of ${plural(this.rollouts.count, "rollout")}${searching}${mean}${older}`;
  }
}
