"""What a child process is told at birth: one JSON file in the run's private directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.endpoints import Endpoints
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.segment_names import SEGMENT_PREFIX
from cp_shared_kv.transfer.messages import PAGE_CHECKSUM, Bytes, Count, Fingerprint, Hello
from cp_shared_kv.transfer.regions import Region

FILE_NAME = "run.json"
PRIVATE_MODE = 0o600


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The model's page formats, as the handshake compares them."""

    latent_format: Fingerprint
    index_format: Fingerprint
    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    index_layers: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    bytes_per_page: Bytes


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a cluster: its name, its config, its sizes."""

    run_id: str
    run_dir: str
    supervisor_pid: int
    config: dict[str, Any]
    limits: EngineLimits
    page_layout: PageLayout
    model_fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    joined: bool = False
    """The run's decode workers belong to a run on another host."""

    def engine_config(self) -> EngineConfig:
        """The config, its rules checked again."""
        return EngineConfig.from_plain(self.config)

    def control_keys(self) -> ControlKeys | None:
        """The keys of the links to other hosts, read now; None where there are no such links."""
        directory = self.config["control_keys"]
        return None if directory is None else ControlKeys.load(Path(directory))

    @property
    def endpoints(self) -> Endpoints:
        """The run's sockets."""
        return Endpoints(Path(self.run_dir))

    def region_name(self, life: Life, part: str, epoch: int) -> str:
        """Shared-memory name of one pool of a life of a unit, in one epoch."""
        return f"{self.region_prefix(life)}{part}-e{epoch}"

    def region_prefix(self, life: Life) -> str:
        """What the names of all shared memory of one life begin with."""
        return f"{SEGMENT_PREFIX}{self.run_id}-{life}-"

    def hello(
        self,
        *,
        role: Literal["prefill", "decode"],
        epoch: int,
        session_id: str,
        physical_pages: int,
        regions: tuple[Region, ...] = (),
    ) -> Hello:
        """This run's greeting from one side of a transfer to the other."""
        return Hello(
            epoch=epoch,
            role=role,
            session_id=session_id,
            transport=self.engine_config().transport,
            cp_size=self.limits.cp_size if role == "prefill" else 1,
            page_size=self.limits.page_size,
            model_fingerprint=self.model_fingerprint,
            physical_pages=physical_pages,
            regions=regions,
            page_checksum=PAGE_CHECKSUM if self.config["verify_kv_transfer"] else "none",
            **msgspec.structs.asdict(self.page_layout),
        )

    def save(self) -> Path:
        """Write the file that `load` reads, for this user alone (mode 0600).

        ConfigError for a path or a name that is no UTF-8, which no message could carry either.
        """
        try:
            content = msgspec.json.format(msgspec.json.encode(self))
        except UnicodeEncodeError as error:
            raise ConfigError(
                "a path or a name of the run is no UTF-8",
                value=ascii(error.object),
                change="rename it, or name another; TMPDIR and XDG_CACHE_HOME count, too",
            ) from error
        path = Path(self.run_dir) / FILE_NAME
        path.touch(PRIVATE_MODE, exist_ok=False)
        path.write_bytes(content)
        return path

    @classmethod
    def load(cls, path: Path) -> RunSpec:
        """Read what the supervisor wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
