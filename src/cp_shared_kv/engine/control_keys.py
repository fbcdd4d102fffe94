"""The key pair of a cluster: whoever holds it may talk to its processes from another host.

One CURVE pair for all hosts of a cluster, in one file. Both halves are kept from strangers: a
server accepts this public key alone, and answers only those who know that key for its own.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cp_shared_kv.errors import ConfigError

FILE_NAME = "cluster.key_secret"
MAX_FILE_BYTES = 10_000
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAKE = "make a pair with `cpkv keys DIRECTORY`, and copy it to each host"


@dataclass(frozen=True)
class ControlKeys:
    """The two halves in Z85, as zmq takes them. Neither shows in a repr."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def create(cls, directory: Path) -> Path:
        """Make a new pair in a directory, which is made too (0700); returns its file (0600).

        ConfigError, and nothing changed, if there is one already or it cannot be written.
        """
        file = directory / FILE_NAME
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise ConfigError(
                "there are keys already, and hosts may hold them",
                value=error.filename,
                change="name another directory, or remove them from every host first",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the keys cannot be written ({error.strerror})", value=error.filename
            ) from error
        import zmq  # here, so that a config needs no zmq

        public, secret = zmq.curve_keypair()
        with os.fdopen(handle, "w", encoding="ascii") as written:
            written.write(
                "# CURVE keys of one cluster of cp-shared-kv. Whoever reads this file can join.\n"
                "metadata\n"
                "curve\n"
                f'    public-key = "{public.decode()}"\n'
                f'    secret-key = "{secret.decode()}"\n'
            )
        return file

    @classmethod
    def load(cls, directory: Path) -> ControlKeys:
        """The pair in a directory. ConfigError if there is none, or if others can read it."""
        from zmq.auth import load_certificate

        file = directory / FILE_NAME
        try:
            found = file.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                raise ConfigError("not a file of keys", value=file, change=_MAKE)
            if found.st_mode & _OTHERS:
                raise ConfigError(
                    "the keys can be read by others",
                    value=f"{file} has mode {stat.S_IMODE(found.st_mode):04o}",
                    allowed="0600: its owner alone",
                    change=f"chmod 600 {file}, or new keys if anybody may have read them",
                )
            public, secret = load_certificate(file)
        except FileNotFoundError as error:
            raise ConfigError("there are no keys", value=file, change=_MAKE) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"the keys cannot be read ({error})", value=file) from error
        if secret is None or not _belong_together(public, secret):
            raise ConfigError("not a pair of keys", value=file, change=_MAKE)
        return cls(public, secret)


def _belong_together(public: bytes, secret: bytes) -> bool:
    import zmq

    try:
        return len(secret) == 40 and zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):
        return False
