"""The commands of the lab: ablate, report, runs, look, export."""
