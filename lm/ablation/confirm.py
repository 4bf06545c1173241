"""The question of a confirmation: the primary arms of a finished ablation again, on seeds that nobody has seen."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm.ablation.ledger import used_seeds
from lm.ablation.record import FILE, AblationRecord, question_of, read_record
from lm.config import UserError

FRESH = range(100, 1000)


def confirmation(source: Path, ledger: Sequence[dict[str, str]], output_dir: Path | None = None) -> dict[str, Any]:
    """The content of a question that asks that of the folder `source` anew, with as many seeds.

    Seeds of runs and of trials are the first of 100 to 999 that neither the ledger nor the folder has used; those of a
    confirmation that has begun are its own. Raises UserError if the folder holds no finished ablation.
    """
    record = read_record(source)
    if not record.ended or record.untuned():
        raise UserError(f"confirm={source}: has not ended; the same command as before continues it")
    name = f"{record.name[:32]}-confirm"
    folder = output_dir or Path("ablations") / name
    arms = [*dict.fromkeys(arm for asked in record.asked() for arm in _chain(record, asked))]
    if (folder / FILE).exists():
        begun = read_record(folder)
        seeds, tuning_seeds = begun.seeds, begun.tune.seeds
    else:
        fresh = _fresh(record, used_seeds(ledger))
        try:
            seeds, tuning_seeds = ([next(fresh) for _ in own] for own in (record.seeds, record.tune.seeds))
        except StopIteration:
            raise UserError(f"confirm={source}: too few seeds of 100 to 999 have not been used") from None
    of_arms = ("baselines", "match_parameters", "seed_offsets")  # keys with a value for each arm
    asked = {key: value for key, value in question_of(record).items() if key not in ("contrasts", "futility")}
    asked |= {key: {arm: value for arm, value in asked[key].items() if arm in arms} for key in of_arms}
    return asked | {
        "name": name,
        "question": f"Confirmation on fresh seeds: {record.question}",
        "arms": {arm: record.arms[arm].overrides for arm in arms},
        "seeds": seeds,
        "tune": asdict(record.tune) | {"seeds": tuning_seeds},
        "base": record.base,
        "overrides": [*record.common, *record.overrides],
    }


def _chain(record: AblationRecord, arm: str) -> Iterator[str]:
    """The baselines of an arm, the last one first, then the arm."""
    if other := record.pairs.get(arm):
        yield from _chain(record, other)
    yield arm


def _fresh(record: AblationRecord, used: set[int]) -> Iterator[int]:
    """Seeds that are unused, also with the offsets of the arms."""
    taken = used | {*record.seeds, *record.tune.seeds, *(seed for seeds in record.analyses for seed in seeds)}
    offsets = {0, *record.seed_offsets.values()}
    for seed in FRESH:
        own = {seed + offset for offset in offsets}
        if own.isdisjoint(taken):
            taken |= own
            yield seed
