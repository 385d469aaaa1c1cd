"""The worst of several verdicts."""

from __future__ import annotations

from drift.verdict import Verdict, worst


def test_no_verdict_at_all_is_no_pass() -> None:
    assert worst([]) is Verdict.INCONCLUSIVE


def test_one_failure_outweighs_everything() -> None:
    assert worst([Verdict.PASS, Verdict.ERROR, Verdict.FAIL]) is Verdict.FAIL
    assert worst([Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR]) is Verdict.ERROR
    assert worst([Verdict.PASS, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert worst([Verdict.PASS, Verdict.PASS]) is Verdict.PASS
