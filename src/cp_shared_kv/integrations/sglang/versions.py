"""The releases of SGLang that the plugin was tested with; everything that knows one is below here.

A release's module says what its functions looked like when they were tested, and the few ways in
which its calls differ.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from cp_shared_kv.errors import StartupError

_MODULES: Mapping[str, str] = {
    "0.5.11": "release_0_5_11",
    "0.5.12.post1": "release_0_5_12_post1",
}
SUPPORTED = tuple(_MODULES)


class Release(Protocol):
    """What a release's module holds."""

    @property
    def FINGERPRINTS(self) -> Mapping[str, str]:  # noqa: N802 (constants of a module)
        """By target: the hash of its source, see source_fingerprint.py."""
        ...

    @property
    def STATE_IS_LIST_OF_COMPONENTS(self) -> bool:  # noqa: N802
        """Whether state pages come as a list for each kind of state, or as one list of pages."""
        ...


def installed_version() -> str | None:
    """The version of the SGLang that this process would import; None where there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def package_root() -> Path:
    """The folder that holds the sglang package. StartupError where there is none."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise StartupError(
            "SGLang is not installed",
            allowed=", ".join(SUPPORTED),
            change=f"pip install sglang=={SUPPORTED[0]}",
        )
    return Path(spec.submodule_search_locations[0]).parent


def release(version: str | None) -> Release | None:
    """What is known of a release; None for one that the plugin was not tested with."""
    name = _MODULES.get(version or "")
    if name is None:
        return None
    return cast(Release, importlib.import_module(f"{__package__}.{name}"))
