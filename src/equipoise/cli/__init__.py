"""The top floor: one short file per verb."""
