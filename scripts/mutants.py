"""Plant faults in a copy of the tree, one at a time, and see that tests find each of them.

python scripts/mutants.py [NAME ...]

Without names the script plants all faults of the table MUTANTS. It exits with 1 if a fault survives
its tests. If code or a test has moved, change the row of the table.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SELECTION = "not nightly and not gpu and not lm_eval"


def no_part(folder: str, names: list[str]) -> set[str]:
    """Return what a copy of the tree leaves out: hidden and compiled files, and the runs of a user."""
    made = {"runs", "ablations"} if Path(folder) == ROOT else set()  # lm/lab/runs is a package
    return {name for name in names if name.startswith(".") or name in made | {"__pycache__"}}


class Mutant(NamedTuple):
    """A fault: `new` replaces `old`, which the file at `path` contains once."""

    name: str
    path: str
    old: str
    new: str
    test: str  # the file of the tests that find the fault
    keyword: str  # an expression that selects these tests, as for `pytest -k`


MUTANTS = [
    Mutant(  # Attention sees the future.
        "causal",
        "lm/model/kernels.py",
        old="is_causal=mask is None",
        new="is_causal=False",
        test="tests/test_model.py",
        keyword="on_the_present_and_the_past",
    ),
    Mutant(  # With a cache, a token sees the next place too.
        "mask",
        "lm/model/transformer.py",
        old="_additive_mask(keys > positions[..., None], dtype)",
        new="_additive_mask(keys > positions[..., None] + 1, dtype)",
        test="tests/test_model.py",
        keyword="cached_equals_full",
    ),
    Mutant(  # The two coordinates of a pair are rotated by equal signs.
        "rope",
        "lm/model/transformer.py",
        old="torch.cat((-frequencies, frequencies))",
        new="torch.cat((frequencies, frequencies))",
        test="tests/test_model.py",
        keyword="rope_rotates",
    ),
    Mutant(  # A block counts as one branch of the residual stream, not as two.
        "residual_scale",
        "lm/model/init.py",
        old="math.sqrt(2 * net.config.n_layers)",
        new="math.sqrt(net.config.n_layers)",
        test="tests/test_model.py",
        keyword="residual_projections",
    ),
    Mutant(  # The tied matrix gets no gradient through the logits.
        "tying",
        "lm/model/head.py",
        old="        return embedding\n",
        new="        return embedding.detach()\n",
        test="tests/test_train.py",
        keyword="golden",
    ),
    Mutant(  # The padding of the last validation window is scored.
        "ignored",
        "lm/data/batches.py",
        old="shift(np.where(places < len(tokens), ids, IGNORED))",
        new="shift(ids)",
        test="tests/test_batches.py",
        keyword="validation_has_each_token",
    ),
    Mutant(  # A token is its own target.
        "shift",
        "lm/data/batches.py",
        old="whole[:, :-1], whole[:, 1:]",
        new="whole[:, 1:], whole[:, 1:]",
        test="tests/test_batches.py",
        keyword="function_of_seed_and_index",
    ),
    Mutant(  # The gradients of micro-batches are added, not averaged.
        "accumulation",
        "lm/training/train.py",
        old="fabric.backward(loss / n_micro)",
        new="fabric.backward(loss)",
        test="tests/test_train.py",
        keyword="micro_batches",
    ),
    Mutant(  # Norms and biases have weight decay.
        "weight_decay",
        "lm/training/optim.py",
        old='"lr": adam_lr, "weight_decay": 0.0}',
        new='"lr": adam_lr, "weight_decay": config.weight_decay}',
        test="tests/test_optim.py",
        keyword="block_matrices_alone_decay",
    ),
    Mutant(  # The learning rate of the first step is zero.
        "schedule",
        "lm/training/optim.py",
        old="(step + 1) / (config.warmup_steps + 1)",
        new="step / (config.warmup_steps + 1)",
        test="tests/test_optim.py",
        keyword="decay_covers_its_fraction",
    ),
    Mutant(  # The average of gradients keeps what it should replace.
        "momentum",
        "lm/training/optim.py",
        old='(averages, gradients, 1 - group["momentum"])',
        new='(averages, gradients, group["momentum"])',
        test="tests/test_optim.py",
        keyword="nesterov",
    ),
    Mutant(  # The update of a tall matrix has another size.
        "muon",
        "lm/training/optim.py",
        old="max(1.0, rows / columns) ** 0.5",
        new="max(1.0, rows / columns)",
        test="tests/test_optim.py",
        keyword="nesterov_momentum",
    ),
    Mutant(  # A resumed run has new moments.
        "optimizer_state",
        "lm/training/state.py",
        old='self.optimizer.load_state_dict(content["optimizer"])',
        new="pass",
        test="tests/test_resume.py",
        keyword="stopped_twice and smoothed",
    ),
    Mutant(  # A resumed run reads its first batches again.
        "position",
        "lm/training/train.py",
        old="number = state.step * n_micro + k",
        new="number = (state.step - sum(state.resumed_from[-1:])) * n_micro + k",
        test="tests/test_resume.py",
        keyword="stopped_twice and smoothed",
    ),
    Mutant(  # The training text holds the validation text.
        "split",
        "lm/data/text.py",
        old="for pieces in (rest, held_out))",
        new="for pieces in (text.spans, held_out))",
        test="tests/test_tokens.py",
        keyword="end_of_a_single_text",
    ),
    Mutant(  # The order of the batches does not depend on the seed.
        "seed",
        "lm/data/batches.py",
        old="default_rng([self.seed, epoch])",
        new="default_rng([0, epoch])",
        test="tests/test_batches.py",
        keyword="in_different_orders",
    ),
    Mutant(  # The interval has the quantile of a normal distribution.
        "quantile",
        "lm/lab/ablation/judge.py",
        old="special.stdtrit(df, 1 - alpha / 2)",
        new="special.ndtri(1 - alpha / 2)",
        test="tests/test_judge.py",
        keyword="scipys_t_tests",
    ),
    Mutant(  # The mean of n differences has n degrees of freedom.
        "degrees_of_freedom",
        "lm/lab/ablation/judge.py",
        old="error, df = sd / math.sqrt(n), n - 1",
        new="error, df = sd / math.sqrt(n), n",
        test="tests/test_judge.py",
        keyword="scipys_t_tests",
    ),
    Mutant(  # The smallest p value has the smallest factor.
        "holm",
        "lm/lab/ablation/judge.py",
        old="(len(ps) - rank) * ps[i]",
        new="(rank + 1) * ps[i]",
        test="lm/lab/ablation/judge.py",
        keyword="holm",
    ),
    Mutant(  # The margin has the wrong sign.
        "equivalence",
        "lm/lab/ablation/judge.py",
        old="margin - max(mean + up, down - mean)",
        new="margin + max(mean + up, down - mean)",
        test="tests/test_judge.py",
        keyword="scipys_t_tests",
    ),
]


def tests_pass(tree: Path, mutants: list[Mutant]) -> bool:
    """Run the tests of some mutants in a tree. Raise SystemExit if pytest finds no tests to run."""
    files = sorted({mutant.test for mutant in mutants})
    keywords = " or ".join(sorted({f"({mutant.keyword})" for mutant in mutants}))
    options = ["-n", "1", "-x", "-p", "no:cacheprovider", "-m", SELECTION, "-k", keywords]
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    if answer.returncode not in (0, 1, 2):  # passed, failed, stopped at the first failure
        sys.exit(f"no tests were run: {keywords}\n{answer.stdout}{answer.stderr}")
    return answer.returncode == 0


def survives(tree: Path, mutant: Mutant) -> bool:
    """Plant a mutant, run its tests, and put the old text back."""
    path = tree / mutant.path
    content = path.read_text()
    if (count := content.count(mutant.old)) != 1:
        sys.exit(f"{mutant.name}: {mutant.path} contains {mutant.old!r} {count} times, not once")
    path.write_text(content.replace(mutant.old, mutant.new))
    passed = tests_pass(tree, [mutant])
    path.write_text(content)
    return passed


def main() -> int:
    names = sys.argv[1:]
    known = [mutant.name for mutant in MUTANTS]
    if unknown := set(names) - set(known):
        print(f"{', '.join(unknown)}: no such mutant; choose from {', '.join(known)}")
        return 2
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = 0
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        shutil.copytree(ROOT, tree, ignore=no_part)
        if not tests_pass(tree, mutants):
            print("tests fail without a mutant")
            return 1
        for mutant in mutants:
            started = time.monotonic()
            survived = survives(tree, mutant)
            survivors += survived
            seconds = time.monotonic() - started
            verdict = "SURVIVED" if survived else "killed"
            print(f"{mutant.name:20} {verdict:8} {seconds:4.0f} s", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
