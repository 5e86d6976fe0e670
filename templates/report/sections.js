// What stands around curves and rollouts: the head of the page, events, the books, the plan and the stack.

const EVENTS_AT_ONCE = 200;
const QUIET = new Set(["weights_updated"]);

function showHead() {
  const { run } = overview;
  document.title = `${run.id} · stackrl report`;
  byId("title").textContent = run.name;
  byId("status").append(make("span", { class: `badge is-${run.status}` }, run.status), " ", make("code", {}, run.id));
  if (run.reason && run.status !== "finished") byId("why").append(make("p", { class: "reason" }, run.reason));
  for (const [name, lines] of run.words) {
    if (!lines.length) continue;
    byId("why").append(make("details", {}, make("summary", {}, `Last lines of ${name}`), make("pre", { class: "code", tabindex: "0" }, lines.join("\n"))));
  }
  byId("facts").append(...headFacts().filter(([, value]) => value).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  byId("written").textContent = `Written ${moment(run.written)} from the run's own files. This page loads nothing and sends nothing.`;
}

function headFacts() {
  const { run, planned } = overview;
  const end = run.ended ?? run.newest;
  const all = planned.reduce((sum, stage) => sum + stage.steps, 0);
  const dropped = Object.entries(overview.dropped).map(([reason, rollouts]) => `${grouped(rollouts)} ${reason.replaceAll("_", " ")}`);
  return [
    ["began", run.began ? moment(run.began) : run.made ? `${moment(run.made)} (made)` : ""],
    ["duration", run.began && end ? duration(end - run.began) : ""],
    ["devices", run.devices],
    ["steps", all ? `${grouped(run.done)} of ${grouped(all)}` : ""],
    ["stages", planned.map((stage) => `${stage.name} (${grouped(stage.steps)})`).join(" → ")],
    ["reward", gain()],
    ["tokens", run.tokens ? `${count(run.tokens)} generated, ${count(run.trained)} trained` : ""],
    ["dropped", dropped.join(", ")],
    ["attempts", run.attempt > 1 || run.incarnation > 1 ? `${run.attempt}; the trainer lived ${run.incarnation} times` : ""],
    ["processes", run.status === "finished" ? "" : run.roles.map(([name, how]) => `${name} ${how}`).join(", ")],
  ];
}

// The mean reward of the first steps and of the last ones, for each stage that has rewards.
function gain() {
  const rewards = column("reward");
  if (!rewards) return "";
  const parts = overview.stages.map((stage, place) => {
    const end = overview.stages[place + 1]?.from ?? Infinity;
    const values = rewards.filter((value, at) => known(value) && overview.curves.from[at] >= stage.from && overview.curves.from[at] < end);
    const size = Math.min(10, Math.max(1, values.length >> 1));
    const mean = (some) => some.reduce((sum, value) => sum + value, 0) / some.length;
    return values.length ? `${stage.name} ${number(mean(values.slice(0, size)), 2)} → ${number(mean(values.slice(-size)), 2)}` : "";
  });
  return parts.filter(Boolean).join(", ");
}

function showEvaluations() {
  const { evaluations } = overview;
  if (!evaluations.length) return;
  const names = [...new Set(evaluations.flatMap(({ numbers }) => Object.keys(numbers)))];
  const rows = evaluations.map(({ stage, when, index, numbers }) => [stage, when, known(index) ? grouped(index) : "–", ...names.map((name) => number(numbers[name]))]);
  byId("evaluations").append(make("h3", {}, "Evaluations"),
    table(["stage", "when", "after step", ...names.map((name) => name.replaceAll("_", " "))], rows, { label: "Evaluations" }));
}

// The newest events first; kinds can be left out.
function showEvents() {
  const kinds = new Map();
  for (const [, name] of overview.events) kinds.set(name, (kinds.get(name) ?? 0) + 1);
  const hidden = new Set([...kinds.keys()].filter((name) => QUIET.has(name) && kinds.size > 1));
  let room = EVENTS_AT_ONCE;
  const paint = () => {
    const shown = overview.events.filter(([, name]) => !hidden.has(name)).reverse();
    byId("events").replaceChildren(...shown.slice(0, room).map(event));
    byId("more-events").hidden = shown.length <= room;
  };
  for (const [name, times] of kinds) {
    const button = make("button", { type: "button", "aria-pressed": String(!hidden.has(name)) }, `${name.replaceAll("_", " ")} ${grouped(times)}`);
    button.addEventListener("click", () => {
      hidden.has(name) ? hidden.delete(name) : hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      paint();
    });
    byId("event-kinds").append(button);
  }
  byId("more-events").addEventListener("click", () => {
    room += EVENTS_AT_ONCE;
    paint();
  });
  paint();
  const { events_left_out: older } = overview;
  if (!overview.events.length) byId("events").replaceWith(make("p", { class: "note" }, "Nothing has happened yet."));
  else if (older) byId("events").after(make("p", { class: "note" }, `${plural(older, "older event")} are in events.jsonl.`));
}

const ALARMING = /fail|alarm|restart|damag|lost|silent|guard|stopping/;

function event([time, name, fields]) {
  const parts = fields.map(([key, value]) => make("span", {}, make("i", {}, `${key.replaceAll("_", " ")} `), value));
  return make("li", { class: ALARMING.test(name) ? "alarming" : null },
    make("time", {}, known(time) ? new Date(time * 1000).toLocaleTimeString("en-GB") : "–"),
    make("strong", {}, name.replaceAll("_", " ")), make("span", { class: "fields" }, ...parts));
}

function showAudit() {
  const { audit } = overview;
  const place = byId("audit");
  if (audit.problem) {
    place.append(make("p", { class: "note" }, audit.problem));
    return;
  }
  const wrong = [["lost", "lost"], ["trained_twice", "trained twice"], ["mixed_groups", "mixed groups"], ["wrong_steps", "wrong steps"]];
  place.append(make("p", { class: "verdict" }, make("span", { class: audit.clean ? "badge is-finished" : "badge is-failed" }, audit.clean ? "clean" : "not clean"),
    " ", wrong.map(([key, name]) => `${name} ${audit[key].length}`).join(", ")));
  for (const [key, name] of wrong) {
    if (audit[key].length) place.append(make("h3", {}, name), make("ul", { class: "plain" }, ...audit[key].map((line) => make("li", {}, line))));
  }
  const { rollouts, steps, speed } = audit;
  const dropped = Object.entries(rollouts.dropped);
  const rows = [
    ["rollouts planned", grouped(rollouts.planned)],
    ["finished", grouped(rollouts.finished)],
    ["trained", grouped(rollouts.trained)],
    ...dropped.map(([reason, times]) => [`dropped: ${reason.replaceAll("_", " ")}`, grouped(times)]),
    ["open", `${grouped(rollouts.open)}${rollouts.open_reason ? ` (${rollouts.open_reason})` : ""}`],
    ["steps", `${grouped(steps.all)}, of RL ${grouped(steps.rl)}`],
    ["tokens per second per device", `${number(speed.recomputed, 1)} recomputed, ${number(speed.reported, 1)} reported`],
    ["read from", [audit.journal, audit.ledger && `the ledger of ${audit.ledger}`].filter(Boolean).join(" and ")],
    ...audit.checkpoints.map((each) => [`checkpoint ${each.name}`, each.problem || "whole"]),
  ];
  place.append(table(["what", ""], rows, { label: "The books" }), ...audit.notes.map((note) => make("p", { class: "note" }, note)));
}

function showPlan() {
  const { plan } = overview;
  if (!plan.length) byId("plan").append(make("p", { class: "note" }, "The run has no plan yet."));
  else byId("plan").append(table(Object.keys(plan[0]), plan.map((row) => Object.values(row)), { label: "Processes" }));
}

function showStack() {
  byId("stack").textContent = overview.stack;
  const names = overview.environment;
  byId("environment").textContent = `The stack with all defaults.${names.length ? ` Given to the run, values not shown: ${names.join(", ")}.` : ""}`;
}
