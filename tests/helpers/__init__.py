"""What several test modules share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
