"""List runs with what differs between them: python scripts/runs.py [FOLDER] [where=QUERY] [sort=KEY]"""

from lm.cli.main import main

if __name__ == "__main__":
    main("runs")
