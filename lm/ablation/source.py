"""Which code a run's numbers depend on."""

import ast
import hashlib
from pathlib import Path

HOME = Path(__file__).parent.parent
TRAINING = ("batches", "callbacks", "corpus", "data", "evaluate", "optim", "task", "tokenizer", "train", "trainer")


def source_hash() -> str:
    """Of the code that a run's numbers depend on, without comments, docstrings and layout."""
    paths = [*(HOME / f"{name}.py" for name in TRAINING), *sorted((HOME / "model").glob("*.py"))]
    digest = hashlib.sha256()
    for path in paths:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        digest.update(f"{path.name}\n{ast.unparse(tree)}".encode())
    return digest.hexdigest()
