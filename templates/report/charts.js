// Curves over the optimizer steps: small multiples with one cursor. Steps are counted from 1, as people do.

const HEIGHT = 132;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 20 };

const column = (name) => overview.curves.columns[name];
const derived = (make, ...names) => {
  const columns = names.map(column);
  if (columns.some((values) => !values)) return undefined;
  return overview.curves.from.map((_, at) => {
    const values = columns.map((each) => each[at]);
    return values.every(known) ? make(...values) : null;
  });
};

// Of each `series` that the run has values of there is a curve; `bands` lie behind them, `marks` are evaluations.
function definitions() {
  const environments = Object.keys(overview.curves.columns).filter((name) => name.startsWith("reward/"));
  const share = { format: percent, low: 0, high: 1 };
  return [
    {
      title: "Reward", series: [["mean", column("reward")]],
      marks: overview.evaluations.filter(({ index, numbers }) => known(index) && known(numbers.reward)),
      bands: [
        ["least to most", column("reward_min"), column("reward_max")],
        ["± deviation", derived((mean, spread) => mean - spread, "reward", "reward_std"),
          derived((mean, spread) => mean + spread, "reward", "reward_std")],
      ],
    },
    environments.length > 1 && {
      title: "Reward by environment",
      series: environments.map((name) => [name.slice("reward/".length), column(name)]),
    },
    { title: "Solved", ...share, series: [["solved", column("solved")], ["groups with signal", column("group_signal")]] },
    { title: "Staleness", unit: "steps", series: [["mean", column("staleness_mean")], ["most", column("staleness_max")]] },
    { title: "Mismatch, engine to trainer", unit: "KL, nats per token", series: [["KL", column("trainer/mismatch_kl")]] },
    { title: "Entropy", unit: "nats per token", series: [["entropy", column("trainer/entropy")]] },
    { title: "Gradient norm", series: [["before clipping", column("trainer/gradient_norm")]] },
    { title: "Loss", series: [["loss", column("trainer/loss")], ["of held-out rows", column("trainer/validation_loss")]] },
    { title: "Load of experts", unit: "most over mean, of the worst layer", series: [["imbalance", column("trainer/load_imbalance")]] },
    { title: "Speed", unit: "tokens per second, all devices", format: count, low: 0, series: [["generated and trained", column("tokens_per_second")]] },
    {
      title: "Waiting", ...share, unit: "share of the time",
      series: [
        ["trainer for rollouts", derived((wait, step) => Math.min(1, wait / step), "seconds_rollouts_wait", "seconds_step")],
        ["engines idle", derived((busy) => 1 - busy, "engine_busy")],
      ],
    },
    { title: "Length", unit: "sampled tokens per rollout", format: count, series: [["mean", derived((all, rollouts) => all / rollouts, "tokens_generated", "rollouts")]] },
    { title: "Dropped", unit: "rollouts since the last step", format: count, low: 0, series: [["dropped", column("dropped")]] },
  ].filter((chart) => chart && chart.series.some(([, values]) => values?.some(known)));
}

class Cursor {
  constructor() {
    this.charts = [];
    this.at = null;
  }

  move(at) {
    this.at = at;
    for (const chart of this.charts) chart.read(at);
  }
}

class Chart {
  constructor({ title, unit, series, bands = [], marks = [], format = number, low, high }, cursor) {
    Object.assign(this, { title, marks, format, low, high, cursor });
    this.series = series.filter(([, values]) => values?.some(known));
    this.bands = bands.filter(([, lower, upper]) => lower?.some(known) && upper?.some(known));
    this.reading = make("p", { class: "reading" });
    this.picture = draw("svg", { role: "img", tabindex: "0", height: HEIGHT });
    this.element = make("figure", { class: "chart" },
      make("figcaption", {}, make("strong", {}, title), unit ? make("span", { class: "unit" }, ` ${unit}`) : ""),
      this.reading, this.picture);
    this.picture.addEventListener("pointermove", (event) => cursor.move(this.nearest(event)));
    this.picture.addEventListener("pointerdown", (event) => cursor.move(this.nearest(event)));
    this.picture.addEventListener("pointerleave", () => cursor.move(null));
    this.picture.addEventListener("blur", () => cursor.move(null));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.fit(this.room())).observe(this.element);
    this.read(null);
  }

  key(event) {
    const last = overview.curves.to.length - 1;
    const at = this.cursor.at ?? last;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.cursor.move(Math.max(0, Math.min(last, to)));
  }

  room() {
    return Math.floor(this.element.clientWidth);
  }

  fit(width) {
    if (width > 0 && width !== this.width) {
      this.width = width;
      this.paint();
    }
  }

  // Where a step and a value lie in the picture.
  x(index) {
    const [first, last] = [overview.curves.from[0], overview.curves.to.at(-1)];
    const room = this.width - MARGIN.left - MARGIN.right;
    return MARGIN.left + (last > first ? ((index - first) / (last - first)) * room : room / 2);
  }

  y(value) {
    const room = HEIGHT - MARGIN.top - MARGIN.bottom;
    return MARGIN.top + room * (1 - (value - this.bottom) / (this.top - this.bottom));
  }

  middle(at) {
    return (overview.curves.from[at] + overview.curves.to[at]) / 2;
  }

  scale() {
    const columns = [...this.series.map(([, each]) => each), ...this.bands.flatMap(([, a, b]) => [a, b])];
    const values = [...columns.flat().filter(known), ...this.marks.map(({ numbers }) => numbers.reward)];
    let [bottom, top] = [values[0], values[0]];
    for (const value of values) [bottom, top] = [Math.min(bottom, value), Math.max(top, value)];
    [bottom, top] = [Math.min(bottom, this.low ?? bottom), Math.max(top, this.high ?? top)];
    if (bottom === top) [bottom, top] = [bottom - (Math.abs(bottom) || 1) / 2, top + (Math.abs(top) || 1) / 2];
    [this.bottom, this.top] = [bottom, top];
    const rough = (top - bottom) / 3;
    const power = 10 ** Math.floor(Math.log10(rough));
    this.step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    this.ticks = [];
    for (let n = Math.ceil(bottom / this.step); n * this.step <= top + this.step * 1e-9; n++) this.ticks.push(n * this.step);
  }

  // As few digits as tell the ticks apart.
  tickText(tick) {
    const digits = Math.max(0, -Math.floor(Math.log10(this.step) + 1e-9));
    if (this.format !== number) return this.format(tick);
    return digits > 3 || Math.abs(tick) >= 1e5 ? number(tick) : signed(tick.toFixed(digits));
  }

  paint() {
    this.scale();
    const bottom = HEIGHT - MARGIN.bottom;
    this.picture.setAttribute("width", this.width);
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.picture.setAttribute("aria-label", this.described());
    this.picture.replaceChildren();
    for (const tick of this.ticks) {
      const y = this.y(tick);
      this.picture.append(
        draw("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }),
        draw("text", { class: "tick", x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, this.tickText(tick)),
      );
    }
    this.borders(bottom);
    const [first, last] = [overview.curves.from[0], overview.curves.to.at(-1)];
    for (const [index, anchor] of last > first ? [[first, "start"], [last, "end"]] : [[last, "middle"]]) {
      this.picture.append(draw("text", { class: "tick", x: this.x(index), y: HEIGHT - 5, "text-anchor": anchor }, grouped(index + 1)));
    }
    this.bands.forEach(([, lower, upper], place) => this.picture.append(draw("path", { class: `band band-${place}`, d: this.area(lower, upper) })));
    this.series.forEach(([, values], place) => this.curve(values, `curve curve-${place % 4}`));
    for (const { index, numbers, when } of this.marks) {
      const at = { class: "mark", cx: this.x(Math.max(overview.curves.from[0], index - 1)), cy: this.y(numbers.reward), r: 3.5 };
      this.picture.append(draw("circle", at, draw("title", {}, `evaluated ${when}: ${number(numbers.reward)}`)));
    }
    this.line = draw("line", { class: "cursor", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    this.picture.append(this.line);
    this.read(this.cursor.at);
  }

  borders(bottom) {
    const stages = overview.stages;
    const end = overview.curves.to.at(-1) + 1;
    stages.forEach((stage, place) => {
      const x = this.x(stage.from);
      const room = this.x(stages[place + 1]?.from ?? end) - x;
      if (place > 0) this.picture.append(draw("line", { class: "border", x1: x, x2: x, y1: MARGIN.top, y2: bottom }));
      if (stages.length > 1 && room > 40 + 6 * stage.name.length) {
        this.picture.append(draw("text", { class: "stage", x: x + (place ? 4 : 16), y: HEIGHT - 5 }, stage.name));
      }
    });
  }

  // Stretches of known values; a gap ends a line.
  stretches(...columns) {
    const found = [];
    let open = null;
    for (let at = 0; at < columns[0].length; at++) {
      if (columns.every((values) => known(values[at]))) {
        if (!open) found.push((open = []));
        open.push(at);
      } else open = null;
    }
    return found;
  }

  curve(values, style) {
    const point = (at) => `${this.x(this.middle(at)).toFixed(1)},${this.y(values[at]).toFixed(1)}`;
    const stretches = this.stretches(values);
    const path = stretches.map((stretch) => "M" + stretch.map(point).join("L")).join("");
    this.picture.append(draw("path", { class: style, d: path }));
    for (const [at] of stretches.filter((stretch) => stretch.length === 1)) {
      this.picture.append(draw("circle", { class: `${style} lone`, cx: this.x(this.middle(at)), cy: this.y(values[at]), r: 2 }));
    }
  }

  area(lower, upper) {
    const point = (values) => (at) => `${this.x(this.middle(at)).toFixed(1)},${this.y(values[at]).toFixed(1)}`;
    return this.stretches(lower, upper)
      .map((stretch) => `M${stretch.map(point(upper)).join("L")}L${[...stretch].reverse().map(point(lower)).join("L")}Z`)
      .join("");
  }

  nearest(event) {
    const x = event.clientX - this.picture.getBoundingClientRect().left;
    let [low, high] = [0, overview.curves.to.length - 1];
    while (high - low > 1) {
      const half = (low + high) >> 1;
      if (this.x(this.middle(half)) < x) low = half;
      else high = half;
    }
    return Math.abs(this.x(this.middle(low)) - x) < Math.abs(this.x(this.middle(high)) - x) ? low : high;
  }

  // Show the values of one step, or the newest ones.
  read(at) {
    const value = (values) => (at === null ? values.findLast(known) : values[at]);
    const parts = this.series.map(([name, values], place) =>
      make("span", {}, make("i", { class: `key key-${place % 4}` }), `${name} `, make("b", {}, this.format(value(values)))));
    for (const [name, lower, upper] of at === null ? [] : this.bands) {
      if (known(lower[at])) parts.push(make("span", {}, `${name} ${this.format(lower[at])} … ${this.format(upper[at])}`));
    }
    if (at !== null) parts.unshift(make("span", { class: "at" }, stepName(at)));
    this.reading.replaceChildren(...parts);
    if (!this.line) return;
    this.line.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) {
      this.line.setAttribute("x1", this.x(this.middle(at)));
      this.line.setAttribute("x2", this.x(this.middle(at)));
    }
  }

  described() {
    const parts = this.series.map(([name, values]) =>
      `${name} from ${this.format(values.find(known))} to ${this.format(values.findLast(known))}`);
    return `${this.title}: ${parts.join("; ")}; over ${plural(overview.run.done, "step")}`;
  }
}

function stepName(at) {
  const [from, to] = [overview.curves.from[at] + 1, overview.curves.to[at] + 1];
  return from === to ? `step ${grouped(from)}` : `steps ${grouped(from)}–${grouped(to)}`;
}

function showCurves() {
  const cursor = new Cursor();
  cursor.charts = definitions().map((each) => new Chart(each, cursor));
  byId("curves").append(...cursor.charts.map((chart) => chart.element));
  const rooms = cursor.charts.map((chart) => chart.room()); // all before the first is painted: one layout
  cursor.charts.forEach((chart, place) => chart.fit(rooms[place]));
  if (!cursor.charts.length) {
    byId("curves-note").textContent = "No optimizer step has been taken, so there is nothing to draw yet.";
  }
}
