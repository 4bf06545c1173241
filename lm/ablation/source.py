"""Which code a run's numbers depend on."""

import ast
import hashlib
import inspect
from pathlib import Path

from lm.model.linear import LINEARS, linear_class

HOME = Path(__file__).parent.parent
TRAINING = ("batches", "callbacks", "corpus", "data", "evaluate", "optim", "task", "tokenizer", "train", "trainer")


def source_hash(linear: str = "linear") -> str:
    """Of the code that a run's numbers depend on, without comments, docstrings and layout.

    `linear` is the config's model.linear: a class of the user's own counts with all of its file.
    """
    paths = [*(HOME / f"{name}.py" for name in TRAINING), *sorted((HOME / "model").glob("*.py"))]
    if linear not in LINEARS:
        paths.append(Path(inspect.getfile(linear_class(linear))))
    digest = hashlib.sha256()
    for path in paths:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        digest.update(f"{path.name}\n{ast.unparse(tree)}".encode())
    return digest.hexdigest()
