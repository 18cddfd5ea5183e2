"""`make bench`: every benchmark in one run on one machine, so that its ratios mean something."""

import argparse
import importlib
import json
import os
import platform

BENCHMARKS = ("bench_start", "bench_data", "bench_tft", "bench_recovery", "bench_throughput")


def main() -> None:
    """Run the named benchmarks (default: all) and print one table each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {BENCHMARKS}; default: all")
    parser.add_argument("--json", help="also write all figures to this file")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    figures = {}
    for name in arguments.names or BENCHMARKS:
        print(f"\n== {name}")
        figures[name] = importlib.import_module(f"benchmarks.{name}").run()
    if arguments.json:
        with open(arguments.json, "w") as file:  # noqa: PTH123 - a path from the command line
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
