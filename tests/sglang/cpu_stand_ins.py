"""Modules that SGLang imports and that no CPU can run: they import, and raise when called.

They stand in from this module's import on, and only for what is not installed. Nothing of SGLang
itself is replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

PACKAGES = ("sgl_kernel", "torchvision")


class _Name(type):
    """A class whose attributes are plain strings: enough for an enumeration's members."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise RuntimeError(f"{cls.__name__} needs a GPU build; this is a test's stand-in")


class _Module(types.ModuleType):
    __version__ = "0.26.0"
    __path__: list[str] = []  # noqa: RUF012 (a package, whatever is imported below it)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Name(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: list[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: object = None, target: object = None):
        if fullname.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
sys.meta_path.append(_Finder(_MISSING))
