"""A rollout as an engineer meets it: a policy, a start, the page that is watched, why it failed, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.browser.test_admin_walk import PATIENCE_MS, Walk
from tests.faults.instance import NEW, OLD, Instance

pytestmark = pytest.mark.slow

POLICY = "by-language"
REWIND = "from tests.controlplane.rollouts.rewind import main; main()"
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 800}
NUM_REQUESTS = 6

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def instance(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """What `make run` starts, around the instant engine, whose versions have different voices."""
    home = tmp_path_factory.mktemp("rollout") / "home"
    with Instance(prepared_home, home, max_requests=8) as instance:
        instance.change(deadline_s=20, store_texts=True)
        yield instance


@pytest.fixture
def walk(browser: Browser, instance: Instance, shots: Path) -> Iterator[Walk]:
    """A fresh window of an ordinary size."""
    context = browser.new_context(viewport=DESK)  # type: ignore[arg-type]
    yield Walk(context.new_page(), instance, shots)
    context.close()


def test_a_candidate_that_fails_in_one_language_is_watched_explained_and_taken_back(
    walk: Walk,
) -> None:
    walk.log_in()
    write_policy(walk)
    start(walk)
    watch_shadow(walk)
    read_why_it_failed(walk)
    try_again_and_roll_back(walk)
    assert walk.complaints == []


def write_policy(walk: Walk) -> None:
    """Begin with a preset; a mistake is told beside its field."""
    page = walk.page
    walk.open("rollouts/policy")
    page.locator("a[href$='/rollouts/policy/add/']").first.click()
    page.get_by_role("link", name="quick", exact=True).click()
    page.get_by_label("Name").first.fill(POLICY)
    page.locator("input[name=block_s]").fill("5")
    page.locator("input[name=steps-1-bp]").fill("")
    page.locator("input[name=traffic-0-segment]").fill("lang=es")
    page.locator("input[name=traffic-0-per_hour]").fill("4000")
    page.locator("button[name=save]").click()
    expect(page.get_by_text("steps[1].bp is missing")).to_be_visible()
    picture(walk, "editor")
    page.locator("input[name=steps-1-bp]").fill("2500")
    page.locator("button[name=save]").click()
    expect(page.get_by_text(f"Policy {POLICY}/1 is saved.")).to_be_visible()
    shoot(walk, "policy")


def start(walk: Walk) -> None:
    """On the page of the endpoint."""
    page = walk.page
    walk.open("endpoints/endpoint")
    page.get_by_role("link", name=walk.instance.endpoint_name, exact=True).click()
    page.get_by_role("link", name="Start a rollout").click()
    page.get_by_label("Candidate").select_option(NEW)
    page.get_by_label("Policy").select_option(POLICY)
    page.get_by_label("Reason").fill("Smaller weights.")
    shoot(walk, "start")
    walk.press("Start the rollout")
    expect(page.get_by_text("has begun.")).to_be_visible()
    shoot(walk, "preparing")


def watch_shadow(walk: Walk) -> None:
    """The page renews itself: the candidate gets ready, then copies are compared, and nothing is loaded anew."""
    page = walk.page
    page.evaluate("window.wasHere = true")
    expect(page.locator("tr[aria-current=step]")).to_contain_text("shadow of 50%")
    ask(walk.instance)
    copies = page.locator("tr").filter(has_text="answered by the candidate")
    expect(copies.locator("td[data-label=Compared]")).not_to_have_text("0")
    assert page.evaluate("window.wasHere")
    picture(walk, "shadow")


def read_why_it_failed(walk: Walk) -> None:
    """The gates have looked: the page tells the segment, the numbers, and the pairs that speak against it."""
    page = walk.page
    assert walk.instance.run_python(REWIND) == "done\n"
    why = page.get_by_role("status")
    expect(why).to_contain_text("failure_rate on lang=es")
    assert page.evaluate("window.wasHere")
    expect(page.get_by_text("rolled back", exact=False).first).to_be_visible()
    worst = page.locator("tr", has=page.locator("td[data-label=Segment]", has_text="lang=es")).first
    expect(worst.locator("td[data-label=Verdict]")).to_have_text("✗ fail")
    pair = page.locator("details").first
    expect(pair).to_contain_text("no answer: engine_failed")
    expect(pair.locator("pre").nth(1)).to_have_text("En <b>cinco</b> días.")
    picture(walk, "failed")
    assert walk.instance.endpoint()["live"] == OLD


def try_again_and_roll_back(walk: Walk) -> None:
    """One press takes it back; the reason is added afterwards."""
    page = walk.page
    page.get_by_role("link", name="Try again").click()
    page.get_by_label("Reason").fill("The template is mended.")
    walk.press("Try again")
    expect(page.get_by_text("is preparing.")).to_be_visible()
    expect(page.locator("tr[aria-current=step]")).to_contain_text("shadow of 50%")
    walk.press("Roll back")
    expect(page.get_by_text("↩ rolled back").first).to_be_visible()
    page.get_by_role("link", name="add the reason").first.click()
    page.get_by_label("Reason").fill("It was the wrong build.")
    walk.press("Note the reason")
    expect(page.get_by_role("status")).to_have_text("It was the wrong build.")
    shoot(walk, "taken_back")
    walk.open("rollouts/rollout")
    expect(page.get_by_text("↩ rolled back")).to_have_count(2)
    shoot(walk, "rollouts")


def ask(instance: Instance) -> None:
    """Requests of an application, of which half are copied."""
    for number in range(NUM_REQUESTS):
        reply = httpx.post(
            f"{instance.run['gateway_url']}/v1/chat/completions",
            headers={"Authorization": f"Bearer {instance.run['api_key']}"},
            json={
                "model": instance.endpoint_name,
                "messages": [{"role": "user", "content": f"Where is order {number}?"}],
                "max_tokens": 8,
            },
            timeout=PATIENCE_MS / 1000,
        )
        assert reply.status_code == httpx.codes.OK, reply.text


def picture(walk: Walk, name: str) -> None:
    """A picture of the whole page, by day, by night and on a phone, which it may not be wider than."""
    page = walk.page
    shoot(walk, name)
    page.evaluate("document.documentElement.classList.add('dark')")
    shoot(walk, f"{name}_dark")
    page.evaluate("document.documentElement.classList.remove('dark')")
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    width = page.evaluate("document.documentElement.scrollWidth")
    shoot(walk, f"{name}_phone")
    page.set_viewport_size(DESK)  # type: ignore[arg-type]
    assert width <= PHONE["width"], f"{name} is {width} px wide on a phone"


def shoot(walk: Walk, name: str) -> None:
    walk.page.screenshot(path=walk.shots / f"{name}.png", full_page=True)
