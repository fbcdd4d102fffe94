"""cpkv sglang: about the plugin for SGLang."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from cp_shared_kv.integrations.sglang import doctor as plugin_doctor
from cp_shared_kv.integrations.sglang import versions

app = App(name="sglang", help="The plugin for SGLang: whether it fits what is installed.")


@app.command
def doctor(
    *server_arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> int:
    """Check this environment's SGLang, and what it would say to a command line.

    Parameters
    ----------
    server_arguments:
        The arguments of the server, after two dashes: cpkv sglang doctor -- --model-path ...
    """
    findings = plugin_doctor.check_installation()
    if server_arguments and all(finding.good for finding in findings):
        findings += plugin_doctor.check_command_line(server_arguments)
    for finding in findings:
        print(f"{'ok  ' if finding.good else 'BAD '} {finding.what}: {finding.detail}")
    if versions.release(versions.installed_version()) is None:
        print(
            "next: run this with the Python of SGLang's environment, or install a tested release "
            f"into this one: pip install sglang=={versions.SUPPORTED[0]}"
        )
    return 0 if all(finding.good for finding in findings) else 1
