"""Where the time of the tests goes, by file.

pytest --numprocesses 2 --dist loadfile --junitxml tests.xml
python -m tests.durations tests.xml
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

_SHOWN = 40


def main() -> None:
    """Print a table of the files that take longest, and the sums over all."""
    seconds: dict[str, float] = defaultdict(float)
    own: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for case in ElementTree.parse(Path(sys.argv[1])).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
        seconds[file] += float(case.attrib["time"])
        own[file] += sum(
            float(each.attrib["value"]) for each in case.iter("property") if each.attrib["name"] == "cpu_s"
        )
        count[file] += 1
    print("| file | tests | s | of these, CPU of its own process |\n| --- | --- | --- | --- |")
    for file in sorted(seconds, key=lambda name: -seconds[name])[:_SHOWN]:
        print(f"| {file} | {count[file]} | {seconds[file]:.0f} | {own[file]:.0f} |")
    total = sum(seconds.values())
    print(f"| all {len(seconds)} | {sum(count.values())} | {total:.0f} | {sum(own.values()):.0f} |")


if __name__ == "__main__":
    main()
