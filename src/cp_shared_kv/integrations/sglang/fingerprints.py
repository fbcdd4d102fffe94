"""python -m cp_shared_kv.integrations.sglang.fingerprints: the table for a release's module.

Of the SGLang that is installed. For whoever adds a release, after testing with it.
"""

from __future__ import annotations

from cp_shared_kv.integrations.sglang import verify, versions
from cp_shared_kv.integrations.sglang.source_fingerprint import source_fingerprint


def table() -> str:
    """The mapping as source text, in the order of targets."""
    root = versions.package_root()
    rows = [f'    "{t}": "{source_fingerprint(root, t)}",' for t in sorted(verify.fingerprinted())]
    return "\n".join(["FINGERPRINTS: Mapping[str, str] = {", *rows, "}"])


if __name__ == "__main__":
    print(table())
