"""The command line: parsing, and errors as one readable line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, Parameter
from rich.console import Console

from cp_shared_kv._version import __version__
from cp_shared_kv.cli.help_layout import HELP_FORMATTER
from cp_shared_kv.cli.join import join
from cp_shared_kv.cli.keys import keys
from cp_shared_kv.cli.plan import plan
from cp_shared_kv.cli.serve import serve
from cp_shared_kv.cli.simulate import simulate
from cp_shared_kv.cli.trace import app as trace_app
from cp_shared_kv.cli.whole_numbers import PARAMETERS
from cp_shared_kv.errors import ConfigError, CpkvError

EXIT_ERROR = 1

app = App(
    name="cpkv",
    help="One logical KV pool for a prefill context-parallel group: N ranks, N times the "
    "capacity, the same answers.",
    version=__version__,
    default_parameter=Parameter(negative=()),
    group_parameters=PARAMETERS,
    help_formatter=HELP_FORMATTER,
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # run() says it
)
# By name, so that help and a refused flag need not wait for torch, which the demo imports.
app.command(
    "cp_shared_kv.cli.demo:demo",
    name="demo",
    help="Run a prompt larger than one rank, end to end, and prove that sharing changed no bit.",
)
app.command(join)
app.command(keys)
app.command(plan)
app.command(serve)
app.command(simulate)
app.command(trace_app)
app.command("cp_shared_kv.cli.sglang:app", name="sglang", help="The plugin for SGLang.")


def refuse_empty(arguments: Sequence[str]) -> None:
    """ConfigError for an empty argument: as a path it would be the current directory.

    `cpkv sglang` hands its arguments on, and takes any.
    """
    if arguments[:1] == ["sglang"]:
        return
    for before, argument in zip(["cpkv", *arguments], arguments, strict=False):
        flag, sign, value = argument.partition("=")
        if not argument or (flag.startswith("--") and sign and not value):
            raise ConfigError(
                f"the argument after {before} is empty" if not argument else f"{flag} is empty",
                change="give it a value, or leave it out; a shell's variable may not be set",
            )


def refuse_undecodable(arguments: Sequence[str]) -> None:
    """ConfigError for bytes that are no UTF-8: neither JSON nor a terminal takes them.

    `cpkv sglang` hands its arguments on, and takes any.
    """
    if arguments[:1] == ["sglang"]:
        return
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "an argument is no UTF-8",
                value=ascii(argument),
                change="rename the file, or check the terminal's encoding",
            ) from None


def run() -> int:
    """Run one command; what the user can mend is one line on stderr, not a traceback."""
    try:
        refuse_empty(sys.argv[1:])
        refuse_undecodable(sys.argv[1:])
        return app() or 0
    except CpkvError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"cpkv: {error}", markup=False)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("cpkv: interrupted", file=sys.stderr)
        return 130
