"""The report in a real browser: drawn, filtered, safe from what a model says, readable on a phone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from statistics import fmean

import pytest
import pytest_asyncio
from browser import CHROMIUM, DESKTOP, PHONE, Page, browse
from written_runs import WARMUP, empty_run, written_run

from stackrl.runtime.monitor.kept_rollouts import KeptRollout, KeptStep, read_steps
from stackrl.runtime.monitor.records import Tail
from stackrl.runtime.monitor.report import write_report
from stackrl.runtime.run import RunFolder, State

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]
HOSTILE = (
    "<script>window.stolen=1</script><img src=x onerror=\"window.stolen=1\"><svg onload='window.stolen=1'>"
    '<a href="javascript:window.stolen=1">naïve 你好 ✓</a>'
)


@dataclass
class Written:
    """A run of 600 rollouts with its report. One rollout says HOSTILE."""

    run: RunFolder
    address: str
    steps: list[KeptStep]

    @property
    def rollouts(self) -> list[tuple[KeptStep, KeptRollout]]:
        return [(step, rollout) for step in self.steps for rollout in step.rollouts]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    def answer(group: int, number: int) -> str:
        return HOSTILE if (group, number) == (5, 0) else f"an answer of {group} and {number} " * 3

    run = written_run(tmp_path_factory.mktemp("written"), 600, 40, answer)
    run.write_state(State(**{**vars(run.state()), "status": "failed", "reason": HOSTILE}))
    return Written(run, write_report(run).as_uri(), list(read_steps(run.path / "rollouts")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Page]:
    async with browse() as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Page) -> AsyncIterator[Page]:
    """The tab. Whatever a test does, the page asks nobody for anything and never complains."""
    browser.requests.clear()
    browser.complaints.clear()
    yield browser
    assert browser.requests
    assert not [url for url in browser.requests if not url.startswith("file:") or ".html" not in url]
    assert browser.complaints == []
    assert await browser.evaluate("window.stolen") is None


async def found(page: Page) -> str:
    return await page.evaluate("document.getElementById('found').textContent")


async def set_filter(page: Page, name: str, value: str) -> None:
    """Give a filter a value, as a person does; wait until the list follows."""
    await page.evaluate(
        f"(() => {{ const field = document.getElementById('filter-{name}');"
        f" field.value = {json.dumps(value)};"
        " document.getElementById('found').textContent = '';"
        " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    await page.until(
        "document.getElementById('found').textContent &&"
        " !document.getElementById('found').textContent.includes('searched')"
    )


async def read(page: Page, rollout: str) -> None:
    """Open a rollout by its address."""
    await page.evaluate(f"location.hash = 'rollout={rollout}'")
    await page.until(f"document.querySelector('#detail h3')?.textContent === 'Rollout {rollout}'")


async def test_curves_are_drawn_with_the_borders_of_stages(page, written):
    await page.open(written.address)
    drawn = await page.evaluate(
        """[...document.querySelectorAll('.chart')].map(chart => ({
          title: chart.querySelector('strong').textContent,
          points: [...chart.querySelectorAll('path.curve')]
            .map(path => path.getAttribute('d').match(/[ML]/g).length),
          borders: chart.querySelectorAll('.border').length,
          said: chart.querySelector('svg').getAttribute('aria-label'),
        }))"""
    )
    points = {chart["title"]: chart["points"] for chart in drawn}
    steps = len(written.steps)
    assert points["Reward"] == [steps]
    assert points["Staleness"] == points["Waiting"] == [steps, steps]
    assert points["Mismatch, engine to trainer"] == [steps]
    assert points["Entropy"] == points["Gradient norm"] == points["Speed"] == [steps + WARMUP]
    assert all(chart["borders"] == 1 for chart in drawn)
    entropy = next(chart["said"] for chart in drawn if chart["title"] == "Entropy")
    assert entropy == f"Entropy: entropy from 2.000 to 0.567; over {steps + WARMUP} steps"
    assert await page.evaluate("document.querySelectorAll('.chart .mark title').length") == 2
    assert await page.evaluate("document.querySelectorAll('.band').length") == 2


async def test_pointing_at_a_curve_reads_all_of_them(page, written):
    await page.open(written.address)
    records = Tail(written.run.metrics).read()
    await page.point("#curves .chart svg", across=0.999)
    readings = "[...document.querySelectorAll('.reading')].map(reading => reading.textContent)"
    texts = await page.evaluate(readings)
    assert f"step {len(records)}" in texts[0]
    assert f"mean {records[-1]['reward']:.3f}" in texts[0]
    assert f"± deviation {records[-1]['reward'] - records[-1]['reward_std']:.3f}" in texts[0].replace(
        "−", "-"
    )
    assert all(f"step {len(records)}" in text for text in texts)
    await page.evaluate("document.querySelector('#curves .chart svg').focus()")
    await page.press("Home")
    await page.press("ArrowRight")
    await page.press("ArrowRight")
    assert f"step 3mean {records[2]['reward']:.3f}" in (await page.evaluate(readings))[0].replace(
        " mean", "mean"
    )


async def test_the_list_holds_only_what_is_in_sight(page, written):
    await page.open(written.address)
    count = len(written.rollouts)
    assert (await found(page)).startswith(f"{count} of {count} rollouts")
    assert 5 < await page.evaluate("document.querySelectorAll('.row').length") < 60
    await page.evaluate("document.getElementById('list').scrollTop = 1e9")
    last = written.rollouts[-1][1].id
    await page.until(
        f"[...document.querySelectorAll('.row .name')].some(name => name.textContent === '{last}')"
    )
    assert 5 < await page.evaluate("document.querySelectorAll('.row').length") < 60
    sizes = (
        "[...new Set([...document.querySelectorAll('.row')].map(row => row.getAttribute('aria-setsize')))]"
    )
    assert await page.evaluate(sizes) == [str(count)]


async def test_filters(page, written):
    await page.open(written.address)
    rollouts = written.rollouts

    def told(rows: list[tuple[KeptStep, KeptRollout]]) -> str:
        return f"{len(rows)} of {len(rollouts)} rollouts, mean reward {fmean(r.reward for _, r in rows):.3f}"

    await set_filter(page, "step-from", "5")
    await set_filter(page, "step-to", "7")
    some = [(step, r) for step, r in rollouts if 5 <= step.about.index + 1 <= 7]
    assert len(some) == 120
    assert await found(page) == told(some)
    await set_filter(page, "environment", "=swap")
    some = [(step, r) for step, r in some if r.environment == "swap"]
    assert await found(page) == told(some)
    await set_filter(page, "reward-from", "0.3")
    await set_filter(page, "reward-to", "0.4")
    some = [(step, r) for step, r in some if 0.3 <= r.reward <= 0.4]
    assert 0 < len(some) < 60
    assert await found(page) == told(some)
    await page.evaluate("document.querySelector('#filters [type=reset]').click()")
    await page.until(f"document.getElementById('found').textContent.startsWith('{len(rollouts)} of')")
    await set_filter(page, "text", "Answer of 7 and")
    assert (await found(page)).startswith("4 of")
    await set_filter(page, "text", "12-3")
    assert (await found(page)).startswith("1 of")
    await set_filter(page, "text", "nobody said this")
    assert (await found(page)).startswith("0 of")


async def test_orders(page, written):
    await page.open(written.address)
    first = "document.querySelector('.row[data-place=\"0\"] .name').textContent"
    rewards = {rollout.id: rollout.reward for _, rollout in written.rollouts}
    assert await page.evaluate(first) == written.rollouts[0][1].id
    for order, wanted in (("best", max), ("worst", min)):
        await set_filter(page, "order", order)
        assert rewards[await page.evaluate(first)] == wanted(rewards.values())
    await set_filter(page, "order", "oldest")
    assert await page.evaluate(first) == written.steps[-1].rollouts[0].id
    lengths = {rollout.id: rollout.sampled for _, rollout in written.rollouts}
    await set_filter(page, "order", "longest")
    assert lengths[await page.evaluate(first)] == max(lengths.values())


async def test_the_list_is_walked_with_keys(page, written):
    await page.open(written.address)
    await page.evaluate("document.getElementById('list').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"):
        await page.press(key)
    second = written.rollouts[1][1].id
    await page.until(f"document.querySelector('#detail h3')?.textContent === 'Rollout {second}'")
    chosen = "document.getElementById(document.getElementById('list').getAttribute('aria-activedescendant'))"
    assert await page.evaluate(f"{chosen}.querySelector('.name').textContent") == second
    await page.press("End")
    last = written.rollouts[-1][1].id
    await page.until(f"document.querySelector('#detail h3')?.textContent === 'Rollout {last}'")


async def test_hostile_text_is_shown_as_text(page, written):
    await page.open(written.address)
    await set_filter(page, "text", "window.stolen")
    assert (await found(page)).startswith("1 of")
    await read(page, "5-0")
    answer = await page.evaluate("document.querySelector('.turn.answer .tokens').textContent")
    assert answer == HOSTILE + "<|im_end|>"
    shown = await page.evaluate("document.querySelector('.row .answer').textContent")
    assert HOSTILE[:60] in shown
    assert await page.evaluate("document.querySelector('.reason').textContent") == HOSTILE
    assert (
        await page.evaluate("document.querySelectorAll('img, a[href^=javascript], svg[onload]').length") == 0
    )
    await asyncio.sleep(0.2)  # what would load or run has had time to
    assert await page.evaluate("window.stolen") is None


async def test_all_turns_and_the_values_of_a_token(page, written):
    step, rollout = next((step, r) for step, r in written.rollouts if r.id == "20-1")
    await page.open(written.address)
    await read(page, rollout.id)
    titles = await page.evaluate(
        "[...document.querySelectorAll('.turn h4')].map(title => title.firstChild.textContent)"
    )
    assert titles == ["prompt", "answer 1", "environment", "answer 2"]
    sequence = rollout.sequences[0]
    logprobs = memoryview(sequence.logprobs).cast("f")
    trainer = step.logprobs[sequence.document]
    await page.point(".turn.answer .token:nth-child(3)")
    values = (await page.evaluate("document.querySelector('.inspector').textContent")).replace("−", "-")
    assert f"engine {logprobs[2]:.3f}" in values
    told = float(values.partition("trainer ")[2].partition("difference")[0])
    assert told == pytest.approx(trainer[2], abs=2e-3)
    difference = float(values.partition("difference ")[2].partition("advantage")[0])
    assert difference == pytest.approx(trainer[2] - logprobs[2], abs=2e-4)
    span = next(s for s in sequence.spans if s.start <= sequence.trained.find(1) + 2 < s.end)
    assert f"version {span.version}" in values
    assert f"advantage {rollout.advantage:+.3f}" in values
    await page.evaluate("document.querySelector('.turn.answer .token').focus()")
    await page.press("ArrowRight")
    values = (await page.evaluate("document.querySelector('.inspector').textContent")).replace("−", "-")
    assert f"engine {logprobs[1]:.3f}" in values


async def test_tokens_are_coloured_by_what_is_chosen(page, written):
    step, rollout = next((step, r) for step, r in written.rollouts if r.id == "20-1")
    await page.open(written.address)
    await read(page, rollout.id)
    levels = "[...document.querySelectorAll('.turn.answer .token')].map(token => token.dataset.level)"
    side = "plus" if rollout.advantage > 0 else "minus"
    assert {level.split("-")[0] for level in await page.evaluate(levels)} == {side}
    choose = "document.querySelector('input[name=colour][value={}]').click()"
    await page.evaluate(choose.format("difference"))
    sequence = rollout.sequences[0]
    differences = step.logprobs[rollout.id] - memoryview(sequence.logprobs).cast("f")
    for level, difference in zip(await page.evaluate(levels), differences, strict=True):
        assert level.startswith(
            "even" if abs(difference) < 0.0099 else "plus" if difference > 0 else "minus"
        ) or (abs(abs(difference) - 0.01) < 2e-4)
    await page.evaluate(choose.format("probability"))
    assert {level.split("-")[0] for level in await page.evaluate(levels)} == {"surprise"}
    seen = await page.evaluate(
        "getComputedStyle(document.querySelector('.token.surprise-3, .token.surprise-2')).backgroundColor"
    )
    assert seen not in ("", "rgba(0, 0, 0, 0)")
    given = "[...document.querySelectorAll('.turn:not(.answer) .token')].every(token => !token.dataset.level)"
    assert await page.evaluate(given)


async def test_a_broken_prefix_and_lost_logprobs_are_told(page, written):
    step = written.steps[0]
    lost = next(s for r in step.rollouts for s in r.sequences if s.document not in step.logprobs)
    rollout = lost.document.partition("/")[0]
    await page.open(written.address)
    await read(page, rollout)
    await page.evaluate("document.querySelector('input[name=colour][value=difference]').click()")
    unknown = "document.querySelectorAll('.token.unknown').length"
    assert await page.evaluate(unknown) == len(lost.logprobs) // 4
    broken = next(r for r in step.rollouts if len(r.sequences) == 2)
    await read(page, broken.id)
    assert await page.evaluate("document.querySelectorAll('.sequence').length") == 2
    assert f"sequence {broken.id}/1" in await page.evaluate(
        "document.querySelector('.sequences').textContent"
    )


async def test_the_group_beside_a_rollout(page, written):
    await page.open(written.address)
    await read(page, "20-1")
    group = sorted((r for _, r in written.rollouts if r.group == 20), key=lambda r: -r.reward)
    buttons = "[...document.querySelectorAll('.siblings button')]"
    assert await page.evaluate(f"{buttons}.map(button => button.textContent)") == [
        f"{r.reward:.2f}" for r in group
    ]
    other = next(place for place, r in enumerate(group) if r.id != "20-1")
    await page.evaluate(f"{buttons}[{other}].click()")
    await page.until(f"document.querySelector('#detail h3').textContent === 'Rollout {group[other].id}'")


async def test_events_stack_plan_and_books(page, tmp_path):
    run = written_run(tmp_path, 16, 8, books=True)
    await page.open(write_report(run).as_uri())
    names = "[...document.querySelectorAll('#events strong')].map(name => name.textContent)"
    assert await page.evaluate(names) == ["evaluated", "restarted", "evaluated", "stage started"]
    await page.evaluate("document.querySelector('#event-kinds [aria-pressed=false]').click()")
    assert (await page.evaluate(names)).count("weights updated") == 2
    stack = await page.evaluate("document.getElementById('stack').textContent")
    assert "architecture: qwen3" in stack
    plan = await page.evaluate("document.getElementById('plan').textContent")
    assert "trainer-0" in plan and "engine-0" in plan
    books = await page.evaluate("document.getElementById('audit').textContent")
    assert "clean lost 0, trained twice 0, mixed groups 0, wrong steps 0" in books
    assert "trained16" in books


@pytest.mark.parametrize("dark", [False, True])
async def test_a_phone_shows_all_without_scrolling_sideways(page, written, dark):
    await page.open(written.address, size=PHONE, dark=dark)
    assert await page.evaluate("innerWidth") == PHONE[0]
    widest = "document.documentElement.scrollWidth"
    assert await page.evaluate(widest) <= PHONE[0]
    beyond = f"""[...document.querySelectorAll('main *, header *')]
      .filter(element => !element.closest('.scroll, .code, .list, .contents'))
      .filter(element => element.getBoundingClientRect().right > {PHONE[0]})
      .map(element => element.tagName + '.' + element.className)"""
    assert await page.evaluate(beyond) == []
    await page.evaluate("document.querySelector('.row').click()")
    await page.until("document.querySelector('#detail h3')")
    box = await page.evaluate(
        "[document.getElementById('detail').getBoundingClientRect()].map(box => [box.width, box.height])[0]"
    )
    assert box == list(PHONE)
    assert await page.evaluate(widest) <= PHONE[0]
    await page.evaluate("document.querySelector('.back').click()")
    await page.until("!document.body.classList.contains('in-rollout')")
    assert await page.evaluate("getComputedStyle(document.getElementById('detail')).display") == "none"


@pytest.mark.parametrize("dark", [False, True])
async def test_text_stands_out_from_what_is_behind_it(page, written, dark):
    """Contrast of 4.5 and more, as WCAG 2 asks for text."""
    await page.open(written.address, dark=dark)
    ratios = await page.evaluate(
        """(() => {
          const light = (colour) => {
            const [r, g, b] = colour.match(/[0-9a-f]{2}/gi).map((two) => parseInt(two, 16) / 255)
              .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const style = getComputedStyle(document.documentElement);
          const found = {};
          for (const text of ['ink', 'soft', 'first', 'second', 'good', 'bad'])
            for (const back of ['paper', 'panel', 'wash']) {
              const [a, b] = [text, back].map((name) => light(style.getPropertyValue('--' + name)))
                .sort((x, y) => y - x);
              found[`${text} on ${back}`] = (a + 0.05) / (b + 0.05);
            }
          return found;
        })()"""
    )
    assert len(ratios) == 18
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(19, 20, 22)") is dark


async def test_runs_without_steps_open_without_complaint(page, tmp_path):
    new = empty_run(tmp_path / "new")
    await page.open(write_report(new).as_uri())
    assert "No optimizer step" in await page.evaluate("document.getElementById('curves-note').textContent")
    assert "No rollout" in await page.evaluate("document.getElementById('no-rollouts').textContent")
    new.write_state(State(status="failed", reason="engine-0 failed", roles={"engine-0": "failed"}))
    (new.path / "stack.json").unlink()
    (new.path / "plan.json").unlink()
    await page.open(write_report(new).as_uri())
    assert await page.evaluate("document.querySelector('.reason').textContent") == "engine-0 failed"
    one = written_run(tmp_path / "one", 4, 4)
    await page.open(write_report(one).as_uri())
    assert (await found(page)).startswith("4 of 4 rollouts")


async def test_the_policy_lets_nothing_out(browser, written):
    """What a test of the page alone cannot show: even code that ran there would reach nobody."""
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        await browser.open(written.address, size=DESKTOP)
        await browser.evaluate(
            f"fetch('{url}').catch(() => {{}}),"
            f" document.body.append(Object.assign(new Image(), {{src: '{url}'}})), 0"
        )
        await browser.evaluate(
            "document.body.append(Object.assign(document.createElement('script'),"
            " {textContent: 'window.stolen = 1'}))"
        )
        await asyncio.sleep(0.5)
        assert await browser.evaluate("window.stolen") is None
    assert asked == []
