"""List runs with what differs between them: lm-lab runs [FOLDER] [where=QUERY] [sort=KEY]

FOLDER holds runs at any depth, as runs/ (the default) or the folder of an ablation does. The list leaves out settings
that are equal in all runs of a text, and on a terminal also columns that do not fit. where= is a query of pandas, in
which a name has _ for a dot: 'where=head_name == "tied" and val_loss < 3.1'. sort=-val_loss sorts in descending order.
plot=FILE.svg draws the curves of the listed runs, csv=FILE (- is standard output) writes every result.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lm.cli.arguments import parse, split_words, with_folders
from lm.errors import check_output, expand_paths, require
from lm.lab.runs.find import find_runs
from lm.lab.runs.listing import listing, listing_csv, ordered, where
from lm.system.terminal import printable


@dataclass(slots=True, kw_only=True)
class RunsConfig:
    folder: str = "runs"  # folder that holds runs at any depth
    where: str | None = None  # conditions on settings and results, as in "head_name == 'tied' and val_loss < 3.1"
    sort: str = "val_bpb"  # setting or result to sort by; -KEY: descending
    plot: str | None = None  # file, .svg or .png, for the curves of all listed runs
    csv: str | None = None  # file for the list as CSV; -: standard output

    def __post_init__(self) -> None:
        expand_paths(self, "folder", "plot", "csv")
        is_figure = self.plot is None or self.plot.endswith((".svg", ".png"))
        require(is_figure, f"plot={self.plot}", "a name that ends in .svg or .png")


SCHEMA = RunsConfig
TITLE = "Runs of lm-lab"  # in the metadata of a picture, by which the same command may write the picture again


def run(args: list[str]) -> None:
    words, settings = split_words(args, RunsConfig)
    config = parse(RunsConfig, with_folders(words, settings, "folder"))
    plot, table = (Path(name) if name else None for name in (config.plot, config.csv))
    for key, path in {"plot": plot, "csv": table}.items():
        if path is None:
            continue
        check_output(path, key)
        if path.is_file():
            with open(path, "rb") as file:
                begin = file.read(4096)  # empty where a process was killed
            is_earlier = begin.startswith(b"run,") if key == "csv" else TITLE.encode() in begin
            require(is_earlier or not begin, f"{key}={path}", f"a new file, or an earlier {key} of runs")
    every = find_runs(Path(config.folder))
    runs = ordered(where(every, config.where), config.sort) if every else []
    if table is not None and config.csv != "-":  # files first: who reads the list may close it after some lines
        table.write_bytes(listing_csv(runs).encode())  # no temporary file in a folder of others
    if plot is not None:
        from lm.lab.runs.curves import plot_runs

        print(plot_runs(runs, plot, TITLE), file=sys.stderr)
    if config.csv == "-":
        print(printable(listing_csv(runs)), end="")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(listing(runs, len(every), width))
