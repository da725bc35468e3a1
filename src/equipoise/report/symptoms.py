"""Signs that an attack fell short of the model, or that the model hides something; nothing is swallowed."""

from __future__ import annotations

from equipoise.report.section import Cell, Section, Table
from equipoise.report.view import RunView


def symptoms(view: RunView) -> Section | None:
    """The symptoms that the run measured, alarms first."""
    seen = view.summary.get("symptoms") or []
    if not seen:
        return None
    alarms = [row for row in seen if row["alarm"]]
    prose = ["An attacked accuracy is worth what the attack is worth. These signs, measured on the first images of the "
             "run, tell when it should not be believed."]
    prose.append("None of them is alarming." if not alarms else
                 "Alarming: " + "; ".join(sorted({f"{row['name']} ({row['model']})" for row in alarms})) + ".")
    ordered = sorted(seen, key=lambda row: (not row["alarm"], row["model"], row["attack"], row["name"]))
    body = [[Cell(row["name"], row["says"]), Cell(row["model"], row["attack"], row["model"]),
             Cell(f"{row['value']:.3g}", "alarm" if row["alarm"] else "")] for row in ordered]
    table = Table("Symptoms and their values", ("symptom", "model and attack", "value"), body, words=True,
                  folded=not alarms)
    return Section("Symptoms", prose, [table])
