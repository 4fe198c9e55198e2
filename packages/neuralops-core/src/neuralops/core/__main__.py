"""The command ``neuralops``, also ``python -m neuralops.core``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from neuralops.core.instruments import bench, compile_gate, doctor, parity
from neuralops.core.instruments.common import UsageError

INSTRUMENTS = {
    "parity": parity,
    "bench": bench,
    "doctor": doctor,
    "compile_gate": compile_gate,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="neuralops", description="The instruments of the installed NeuralOps families."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, instrument in INSTRUMENTS.items():
        summary = instrument.SUMMARY
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        instrument.add_arguments(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for a finding, 2 for a wrong request."""
    options = _parser().parse_args(arguments)
    try:
        code: int = INSTRUMENTS[options.command].run(options)
    except UsageError as error:
        print(f"neuralops {options.command}: error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
