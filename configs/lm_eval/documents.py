"""The documents of the tasks beside this file, from the paths that --metadata names. lm-eval calls these functions."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset


def text(text: str | None = None, **others: Any) -> dict[str, Dataset]:
    """A text file as one document, character for character."""
    if text is None:
        raise ValueError("""lm_text: name a file by --metadata '{"text": "FILE"}'""")
    return {"test": Dataset.from_list([{"text": Path(text).read_bytes().decode()}])}


def choices(choices: str | None = None, **others: Any) -> dict[str, Dataset]:
    """A JSON Lines file: on each line a `question`, its `choices` and the index of the right one, `answer`."""
    if choices is None:
        raise ValueError("""lm_choice: name a file by --metadata '{"choices": "FILE.jsonl"}'""")
    rows = []
    for number, line in enumerate(Path(choices).read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                rows.append(checked(json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{choices}, line {number}: not JSON ({error})") from error
            except ValueError as error:
                raise ValueError(f"{choices}, line {number}: {error}") from error
    return {"test": Dataset.from_list(rows)}


def checked(row: Any) -> dict[str, Any]:
    if not (isinstance(row, dict) and row.keys() >= {"question", "choices", "answer"}):
        raise ValueError("expected question, choices and answer")
    if not (isinstance(row["choices"], list) and all(isinstance(one, str) for one in row["choices"])):
        raise ValueError(f"choices={row['choices']}, expected a list of texts")
    if type(row["answer"]) is not int or row["answer"] not in range(len(row["choices"])):
        raise ValueError(f"answer={row['answer']}, expected 0 to {len(row['choices']) - 1}")
    return {key: row[key] for key in ("question", "choices", "answer")}
