"""An engineer compares two versions of one model: speed, tail and price of each, and the scrapes behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.instance import Instance
from tests.faults.states import has_ready
from tests.inference.slot_process import wait_until

REAL_ENGINE = {
    "TATKAL_ENGINE": "inference.engine.llm_engine:LLMEngine.load",
    "TATKAL_ENGINE_SLOTS": "2",
    "TATKAL_COST_PER_HOUR": "3.6",
}
BF16, INT4 = "smollm2-135m-instruct/1", "smollm2-135m-instruct/2"
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Write a line about rain.")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def instance(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    home = tmp_path_factory.mktemp("usage") / "home"
    with Instance(prepared_home, home, max_requests=64, **REAL_ENGINE) as instance:
        yield instance


def ask(instance: Instance) -> None:
    """Each question once, of whichever version is live."""
    url, key = f"{instance.run['gateway_url']}/v1", instance.run["api_key"]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        for question in QUESTIONS:
            client.chat.completions.create(
                model=instance.endpoint_name,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=24,
            )


def usage(instance: Instance, group_by: str) -> dict[str, dict[str, Any]]:
    page = instance.call("GET", f"usage?group_by={group_by}")
    return {row["name"]: row for row in page["results"]}


def scrape(url: str) -> dict[str, float]:
    """Sums over all label values, by name of the sample."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(url, timeout=5).text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_two_versions_stand_side_by_side_and_the_scrapes_agree(instance: Instance) -> None:
    ask(instance)
    wait_until(lambda: instance.call("GET", f"versions/{INT4}")["state"] == "ready", timeout_s=120)
    instance.change(candidate=INT4)
    instance.wait_for(lambda state: has_ready(state, INT4), timeout_s=60)
    instance.promote(INT4)
    ask(instance)
    wait_until(lambda: usage(instance, "version").keys() == {BF16, INT4}, timeout_s=15)
    wait_until(lambda: usage(instance, "version")[INT4]["num_ok"] == len(QUESTIONS), timeout_s=15)

    rows = usage(instance, "version")
    num_answers = {BF16: len(QUESTIONS) + 1, INT4: len(QUESTIONS)}  # the start has asked once, too
    for name, row in rows.items():
        assert row["num_requests"] == row["num_ok"] == row["num_billed"] == num_answers[name]
        assert row["engine_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["completion_tokens"] / row["engine_s"])
        assert row["cost_per_1k_tokens"] == pytest.approx(
            3.6 / 3600 * row["engine_s_per_1k_tokens"]
        )
        assert row["total_s"]["n"] == num_answers[name]
        assert row["total_s"]["p50"] >= row["first_token_s"]["p50"] > 0
        assert row["total_s"]["p99"] is None

    gateway, control, *slots = instance.run["metrics_urls"]
    assert len(slots) == 2
    engines = [scrape(url) for url in slots]
    generated = sum(row["completion_tokens"] for row in rows.values())
    billed = sum(row["engine_s"] for row in rows.values())
    # What the slots computed beyond it are the warm-up and the probe of each version.
    assert sum(each["tatkal_generation_tokens_total"] for each in engines) >= generated
    assert sum(each["tatkal_engine_busy_seconds_total"] for each in engines) > billed
    assert scrape(gateway)["tatkal_request_success_total"] == sum(num_answers.values())
    assert scrape(gateway)["tatkal_request_engine_seconds_total"] == pytest.approx(billed)
    assert scrape(gateway)["tatkal_dropped_records_total"] == 0
    assert scrape(control)["tatkal_slots"] == 2

    keys = usage(instance, "key")
    assert sum(row["num_ok"] for row in keys.values()) == sum(num_answers.values())
    told = [slot["telemetry"] for slot in instance.call("GET", "slots")["results"]]
    assert all(each["kv_free"] > 0 for each in told)
