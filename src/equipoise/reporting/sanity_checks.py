"""Signs that an attack fell short of the model, or that the model hides something; nothing is swallowed."""

from __future__ import annotations

from equipoise.core.records import Row
from equipoise.reporting.section import Cell, Section, Table
from equipoise.reporting.view import RunView


def symptoms(view: RunView) -> Section | None:
    """The symptoms that the run measured, alarms first."""
    seen = view.summary.get("symptoms") or []
    if not seen:
        return None
    alarms = [row for row in seen if row["alarm"]]
    prose = ["An attacked accuracy is worth what the attack is worth. These signs, measured on the first images of the "
             "run, tell when it should not be believed."]
    prose.append("None of them is alarming." if not alarms else
                 "Alarming: " + "; ".join(f"{row['name']} ({row['model']}, {row['attack']})" for row in
                                          sorted(alarms, key=lambda row: (row["name"], row["model"], row["attack"])))
                 + ".")
    known = {row["model"] for row in seen if row["attack"].startswith("adaptive")}
    calm = sorted({row["model"] for row in alarms} & known
                  - {row["model"] for row in alarms if row["attack"].startswith("adaptive")})
    if calm:
        prose.append(f"What alarms in {', '.join(calm)} is why there are also adaptive attacks, which know how a "
                     "mixture is built: under them nothing alarms, and the worst case counts them.")
    ordered = sorted(seen, key=lambda row: (not row["alarm"], row["model"], row["attack"], row["name"]))
    tables = [Table(caption, ("symptom", "model and attack", "value"), [_line(row) for row in rows], words=True,
                    folded=not alarming)
              for caption, alarming in (("What alarms.", True), ("What does not alarm.", False))
              if (rows := [row for row in ordered if row["alarm"] == alarming])]
    return Section("Symptoms", prose, tables)


def _line(row: Row) -> list[Cell]:
    return [Cell(row["name"], row["says"]), Cell(row["model"], row["attack"], row["model"]),
            Cell(f"{row['value']:.3g}", "alarm" if row["alarm"] else "")]
