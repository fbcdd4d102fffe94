"""`python -m cp_shared_kv.testing.world SEED`: run a seed again and print all that happened."""

from __future__ import annotations

import sys

from cp_shared_kv.testing.world.run import run


def main(arguments: list[str]) -> int:
    """Exit code 1 if something did not hold."""
    if len(arguments) != 1 or not arguments[0].isdecimal():
        print("usage: python -m cp_shared_kv.testing.world SEED", file=sys.stderr)
        return 2
    outcome = run(int(arguments[0]))
    print(outcome.report())
    return int(outcome.broken is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
