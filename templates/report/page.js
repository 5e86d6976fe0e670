// Puts the page together: what needs no unpacking, then the list, which is unpacked meanwhile.

async function showRollouts(opening) {
  if (!opening) {
    byId("no-rollouts").hidden = false;
    byId("no-rollouts").textContent = "No rollout has been kept: there was no step of reinforcement learning yet, or `monitors.rollouts` keeps none.";
    return;
  }
  const rollouts = await opening;
  byId("browser").hidden = false;
  const list = new RolloutList(rollouts, (row, enter) => go(row, enter));
  const filters = new Filters(rollouts, list);
  const detail = new Detail(rollouts, { step: (by) => list.step(by), open: (row) => go(row, true), close: () => leave() });
  const narrow = matchMedia("(max-width: 860px)");
  const rowOf = new Map(rollouts.columns.id.map((id, row) => [id, row]));

  // The rollout in the address is the one that is open, so that a link leads to it and "back" leaves it.
  function go(row, enter) {
    if (narrow.matches && !enter) return;
    const address = `#rollout=${rollouts.columns.id[row]}`;
    if (narrow.matches && !document.body.classList.contains("in-rollout")) location.hash = address;
    else {
      history.replaceState(null, "", address);
      read();
    }
  }

  function leave() {
    if (!document.body.classList.contains("in-rollout")) byId("list").focus();
    else history.back();
  }

  async function read() {
    const row = rowOf.get(/^#rollout=(.+)$/.exec(location.hash)?.[1]);
    document.body.classList.toggle("in-rollout", row !== undefined && narrow.matches);
    if (row === undefined) return;
    list.follow(row);
    await detail.show(row);
    if (narrow.matches) byId("detail").querySelector("h3").focus({ preventScroll: true });
  }

  window.addEventListener("hashchange", read);
  await filters.apply();
  await read();
}

const opening = overview.rollouts.shown ? Rollouts.open() : null; // goes on while the rest is drawn
showHead();
showCurves();
showEvaluations();
showEvents();
showAudit();
showPlan();
showStack();
showRollouts(opening).then(() => {
  performance.mark("ready");
  document.documentElement.dataset.ready = "true";
});
