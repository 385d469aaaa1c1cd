"""Pages about serving: the planner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from controlplane.dashboard.charts import LivePoint, draw_roofline, draw_steps
from controlplane.dashboard.forms import PlannerForm
from controlplane.endpoints.desk import look
from controlplane.registry import plans
from controlplane.registry.plans import Answer, PlanRefused
from inference.planner.curve import MeasuredStep, StepCurve
from inference.planner.hardware import Calibration, Device
from inference.replicas import SlotStatus


def planner_view(request: HttpRequest) -> HttpResponse:
    """What fits, how fast, what it costs; and how the slots compare with what this machine can do."""
    if not request.user.has_perm("registry.view_version"):
        raise PermissionDenied
    calibration, damage = _calibration()
    machine = calibration.device() if calibration else None
    form = PlannerForm(request.GET, machine=machine)
    answer = _answer(form)
    report = look()
    live = live_points(report.slots if report else ())
    context = {
        **admin.site.each_context(request),
        "title": "Planner",
        "form": form,
        "answer": answer,
        "live": live,
        "damage": damage,
        "calibration": calibration,
        "measured": _measured(machine),
    }
    if answer is not None:
        context["roofline"] = draw_roofline(
            answer.question, answer.plan, machine=machine, live=live
        )
        context["ridge_flops"] = answer.question.device.rate(answer.question.weights)
    return TemplateResponse(request, "dashboard/planner.html", context)


def live_points(slots: Iterable[SlotStatus]) -> list[LivePoint]:
    """Slots that computed something in the last seconds."""
    points = []
    for slot in slots:
        told = slot.telemetry
        intensity, flops_per_s = told.get("intensity"), told.get("flops_per_s")
        if intensity and flops_per_s:
            points.append(
                LivePoint(
                    slot=slot.slot,
                    version=slot.version,
                    intensity=intensity,
                    flops_per_s=flops_per_s,
                    batch_rows=told.get("batch_rows") or 0.0,
                    tokens_per_s=told.get("tokens_per_s") or 0.0,
                    mbu=told.get("mbu"),
                    mfu=told.get("mfu"),
                )
            )
    return points


def _calibration() -> tuple[Calibration | None, str]:
    """What was measured, and what is wrong with it."""
    try:
        return plans.calibration(), ""
    except PlanRefused as error:
        return None, error.message


def _answer(form: PlannerForm) -> Answer | None:
    if not form.is_valid():
        return None
    try:
        return plans.plan(form.inputs())
    except PlanRefused as error:
        form.blame(error.name, error.message)
        return None


def _measured(machine: Device | None) -> dict[str, Any] | None:
    """Measured steps with their drawing; None where there are none, or no machine to hold them against."""
    curves = _curves()
    if machine is None or not curves:
        return None
    return {
        "chart": draw_steps(curves, machine),
        "curves": [
            {"curve": curve, "rows": _rows(curve, machine), "note": curve.explain(machine)}
            for curve in curves
        ],
    }


def _curves() -> tuple[StepCurve, ...]:
    try:
        return plans.measured_steps()
    except PlanRefused:
        return ()


def _rows(curve: StepCurve, machine: Device) -> list[tuple[MeasuredStep, float, float]]:
    """Each step, its floor, and how many times that it took."""
    floors = [curve.floor_s(machine, step.batch) for step in curve.steps]
    return [
        (step, floor_s, step.seconds / floor_s)
        for step, floor_s in zip(curve.steps, floors, strict=True)
    ]
