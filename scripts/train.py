"""Train one run: python scripts/train.py [group=choice] [key=value ...]"""

from lm.cli import launch
from lm.config import RunConfig


def main(run: RunConfig) -> None:
    from lm.train import train

    result = train(run)
    print(result)


if __name__ == "__main__":
    launch(main, RunConfig, "train")
