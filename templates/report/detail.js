// One rollout: its turns, token by token, coloured by what was learnt from them.

const COLOURS = {
  advantage: { title: "advantage", ends: ["worse than its group", "better"], sided: true },
  difference: { title: "trainer − engine", ends: ["trainer finds it less likely", "more likely"], sided: true },
  probability: { title: "engine's surprise", ends: ["sure", "surprised"], sided: false },
};
const DIFFERENCES = [0.01, 0.05, 0.2, 0.5];
const MANY = 1000; // tokens of a turn that is laid out only where it is in sight
const SURPRISES = [0.9, 0.5, 0.1, 0.01];

class Detail {
  constructor(rollouts, { step, open, close }) {
    Object.assign(this, { rollouts, step, open, close, colour: "advantage", shown: null });
    this.element = byId("detail");
    this.most = Math.max(1e-9, ...extent(rollouts.columns.advantage).map(Math.abs));
    for (const kind of ["pointerover", "focusin", "click"]) {
      this.element.addEventListener(kind, (event) => this.inspect(event.target.closest?.("[data-at]")));
    }
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.element.append(make("p", { class: "note empty" }, "Choose a rollout to read it."));
  }

  async show(row) {
    this.row = row;
    const [pieces, rollout] = [await this.rollouts.pieces, await this.rollouts.rollout(row)];
    if (this.row !== row) return;
    this.pieces = pieces;
    this.sequences = rollout.sequences;
    this.inspector = make("output", { class: "inspector", "aria-live": "polite" }, "Point at a token, or walk with ← →, to read its values.");
    this.texts = make("div", { class: "sequences" }, ...rollout.sequences.map((sequence, place) => this.sequence(sequence, place)));
    this.element.replaceChildren(this.head(), this.about(rollout), this.siblings(), this.choice(), this.texts, this.inspector);
    this.element.scrollTop = 0;
    this.paint();
    this.shown = row;
  }

  value(name) {
    return this.rollouts.columns[name][this.row];
  }

  head() {
    const button = (label, title, work) => {
      const element = make("button", { type: "button", title, "aria-label": title }, label);
      element.addEventListener("click", work);
      return element;
    };
    const back = button("←", "Back to the list", () => this.close());
    back.classList.add("back");
    return make("header", {}, back, make("h3", { tabindex: "-1" }, `Rollout ${this.value("id")}`),
      button("↑", "The one before in the list", () => this.step(-1)), button("↓", "The next one in the list", () => this.step(1)));
  }

  about(rollout) {
    const versions = new Set(rollout.sequences.flatMap((sequence) => sequence.spans.map(([, , version]) => version)));
    const facts = [
      ["reward", number(this.value("reward"))],
      ["advantage", withSign(this.value("advantage"))],
      ["step", `${this.value("index") + 1} (${this.value("stage")})`],
      ["environment", this.value("environment")],
      ["turns", this.value("turns")],
      ["sampled", plural(this.value("sampled"), "token")],
      ["versions", [...versions].join(", ") || "–"],
      ["|trainer − engine|", known(this.value("difference")) ? `${number(this.value("difference"), 4)} on average` : "not sent"],
      ...Object.entries(rollout.metrics).map(([name, value]) => [name, number(value)]),
    ];
    return make("dl", { class: "facts small" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  // The other rollouts of the same prompt, best first.
  siblings() {
    const { columns } = this.rollouts;
    const rows = [];
    columns.group.forEach((group, row) => {
      if (group === this.value("group") && columns.index[row] === this.value("index")) rows.push(row);
    });
    rows.sort((a, b) => columns.reward[b] - columns.reward[a] || a - b);
    const buttons = rows.map((row) => {
      const button = make("button", { type: "button", "aria-pressed": String(row === this.row), title: `rollout ${columns.id[row]}` }, number(columns.reward[row], 2));
      button.addEventListener("click", () => this.open(row));
      return button;
    });
    return make("div", { class: "chips siblings", role: "group", "aria-label": "Rewards of the group" },
      make("span", { class: "note" }, `group ${this.value("group")}`), ...buttons);
  }

  choice() {
    const options = Object.entries(COLOURS).map(([name, { title }]) => {
      const input = make("input", { type: "radio", name: "colour", value: name });
      input.checked = name === this.colour;
      input.addEventListener("change", () => {
        this.colour = name;
        this.paint();
      });
      return make("label", {}, input, ` ${title}`);
    });
    this.legend = make("p", { class: "legend" });
    return make("fieldset", { class: "choice" }, make("legend", {}, "Colour the tokens by"), ...options, this.legend);
  }

  // A training sequence as its turns: what was given to the model, and what it answered.
  sequence(sequence, place) {
    const texts = this.pieces.spell(sequence.tokens);
    const turns = [];
    let [sample, answers] = [0, 0];
    for (let at = 0; at < sequence.tokens.length; at++) {
      const trained = sequence.trained[at] === 1;
      if (!turns.length || turns.at(-1).trained !== trained) {
        turns.push({ trained, name: trained ? `answer ${++answers}` : at === 0 ? "prompt" : "environment", first: at, elements: [] });
      }
      const turn = turns.at(-1);
      turn.last = at;
      turn.elements.push(this.token(texts[at], sequence.tokens[at], `${place}:${at}:${trained ? sample++ : -1}`));
    }
    const name = place ? make("p", { class: "note" }, `The template did not continue the tokens before: sequence ${sequence.document}`) : "";
    return make("section", { class: "sequence", "data-sequence": place }, name, ...turns.map((turn) => this.turn(turn, sequence)));
  }

  turn({ trained, name, first, last, elements }, sequence) {
    const versions = sequence.spans.filter(([start, end]) => start <= last && end > first).map(([, , version]) => version);
    const about = [plural(last - first + 1, "token"), ...(trained ? [`version ${[...new Set(versions)].join(", ")}`] : [])];
    return make("div", { class: trained ? "turn answer" : "turn" },
      make("h4", {}, name, make("span", { class: "note" }, ` ${about.join(" · ")}`)),
      make("div", { class: elements.length > MANY ? "tokens many" : "tokens" }, ...elements));
  }

  token(text, place, at) {
    const kinds = ["token"];
    if (this.pieces.special.has(place)) kinds.push("special");
    if (text.includes("\n")) kinds.push("newline");
    if (text === "") kinds.push("part");
    return make("span", { class: kinds.join(" "), "data-at": at, tabindex: at.startsWith("0:0:") ? "0" : "-1" }, text);
  }

  // The numbers of a token, from its place in the page.
  facts(element) {
    const [place, at, sample] = element.dataset.at.split(":").map(Number);
    const sequence = this.sequences[place];
    const facts = { at, id: this.pieces.ids[sequence.tokens[at]], sampled: sample >= 0 };
    if (sample < 0) return facts;
    const difference = sequence.difference[sample];
    facts.engine = sequence.engine[sample] / 1e3;
    facts.difference = difference === NONE ? null : difference / 1e4;
    facts.version = sequence.spans.find(([start, end]) => start <= at && at < end)?.[2];
    return facts;
  }

  level(facts) {
    if (!facts.sampled) return "";
    if (this.colour === "probability") {
      return `surprise-${SURPRISES.filter((limit) => Math.exp(facts.engine) < limit).length}`;
    }
    const value = this.colour === "advantage" ? this.value("advantage") : facts.difference;
    if (value === null) return "unknown";
    const size = Math.abs(value);
    const level = this.colour === "advantage" ? (size ? Math.max(1, Math.round((4 * size) / this.most)) : 0) : DIFFERENCES.filter((limit) => size >= limit).length;
    return level ? `${value > 0 ? "plus" : "minus"}-${level}` : "even";
  }

  paint() {
    for (const element of this.texts.querySelectorAll("[data-at]")) {
      element.classList.remove(element.dataset.level || "even");
      const level = this.level(this.facts(element));
      if (level) element.classList.add(level);
      element.dataset.level = level;
    }
    const { ends, sided } = COLOURS[this.colour];
    const levels = sided ? ["minus-4", "minus-2", "even", "plus-2", "plus-4"] : ["surprise-0", "surprise-1", "surprise-2", "surprise-3", "surprise-4"];
    const scale = { advantage: `±${number(this.most, 2)}`, difference: `steps at ${DIFFERENCES.join(", ")} nats`, probability: "p < 0.9, 0.5, 0.1, 0.01" }[this.colour];
    this.legend.replaceChildren(ends[0], " ", ...levels.map((level) => make("i", { class: `token ${level}`, "aria-hidden": "true" }, "  ")), ` ${ends[1]}`, make("span", { class: "note" }, ` ${scale}`));
  }

  inspect(element) {
    if (!element || element === this.inspected) return;
    this.inspected?.classList.remove("inspected");
    this.inspected = element;
    element.classList.add("inspected");
    const facts = this.facts(element);
    const values = [["id", facts.id], ["place", facts.at]];
    if (facts.sampled) {
      const trainer = facts.difference === null ? null : facts.engine + facts.difference;
      const age = this.value("step") - Number(facts.version?.split(".")[1]);
      values.push(
        ["engine", `${number(facts.engine)} (${percent(Math.exp(facts.engine), 1)})`],
        ["trainer", trainer === null ? "not sent" : number(trainer)],
        ["difference", facts.difference === null ? "–" : withSign(facts.difference, 4)],
        ["advantage", withSign(this.value("advantage"))],
        ["version", `${facts.version} (${plural(age, "step")} old)`],
      );
    } else values.push(["", "given, not trained"]);
    this.inspector.replaceChildren(make("code", {}, JSON.stringify(element.textContent)),
      ...values.map(([name, value]) => make("span", {}, name ? make("i", {}, `${name} `) : "", String(value))));
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.close();
    if (!by || !event.target.matches("[data-at]")) return;
    event.preventDefault();
    const tokens = [...this.texts.querySelectorAll("[data-at]")];
    const next = tokens[tokens.indexOf(event.target) + by];
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
