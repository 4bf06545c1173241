"""The reliability campaign, python -m tests.campaign; docs/reliability.md describes it."""
