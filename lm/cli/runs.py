"""List runs with what differs between them: lm-lab runs [FOLDER] [where=QUERY] [sort=KEY]

FOLDER holds runs at any depth, as runs/ (the default) or the folder of an ablation does. Settings that are equal in all
runs of a text are left out, and on a terminal columns that do not fit. where= is a query of pandas, in which a name has
_ for a dot: 'where=head_name == "tied" and val_loss < 3.1'. sort=-val_loss descends. plot=FILE.svg draws the curves of
the listed runs, csv=FILE (- is standard output) writes every result.
"""

import shutil
import sys
from pathlib import Path

from lm.cli.compose import parse
from lm.cli.words import split_words, with_folders
from lm.config import UserError
from lm.config.commands import RunsConfig
from lm.runs.find import find_runs
from lm.runs.listing import listing, listing_csv, ordered, where
from lm.system.files import write_text
from lm.system.terminal import printable

SCHEMA = RunsConfig


def run(args: list[str]) -> None:
    words, settings = split_words(args, RunsConfig)
    config = parse(RunsConfig, with_folders(words[:1], [*words[1:], *settings], "folder"))
    plot, table = (Path(name) if name else None for name in (config.plot, config.csv))
    for key, path in {"plot": plot, "csv": table}.items():
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{key}={path}: no such folder as {path.parent}")
    every = find_runs(Path(config.folder))
    runs = ordered(where(every, config.where), config.sort) if every else []
    if config.csv == "-":
        print(printable(listing_csv(runs)), end="")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(listing(runs, len(every), width))
    if table is not None and config.csv != "-":
        write_text(table, listing_csv(runs))
    if plot is not None:
        from lm.runs.curves import plot_runs

        print(plot_runs(runs, plot), file=sys.stderr)
