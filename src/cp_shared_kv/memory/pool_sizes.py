"""Bytes of a pool's pages, whatever they hold. Arithmetic alone, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from cp_shared_kv.errors import ConfigError


@dataclass(frozen=True)
class PoolSizes:
    """Row widths of the two kinds of page, and the layers that have them.

    ConfigError for index layers that are not ascending or not layers of the model.
    """

    page_size: int
    latent_row_bytes: int
    index_row_bytes: int
    num_layers: int
    index_layers: tuple[int, ...]
    """Layers with an indexer of their own, ascending; the others have no index pages."""

    def __post_init__(self) -> None:
        layers = list(self.index_layers)
        if layers != sorted(set(layers)) or not all(0 <= i < self.num_layers for i in layers):
            raise ConfigError(
                "index layers",
                value=self.index_layers,
                allowed=f"ascending layers below {self.num_layers}",
            )

    @property
    def latent_page_bytes(self) -> int:
        """Bytes of one latent page of one layer."""
        return self.latent_row_bytes * self.page_size

    @property
    def index_page_bytes(self) -> int:
        """Bytes of one index page of one layer that has an indexer."""
        return self.index_row_bytes * self.page_size

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page of one layer, latent and, where the model has any, index together."""
        return self.latent_page_bytes + (self.index_page_bytes if self.index_layers else 0)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one physical page over all layers."""
        return self.bytes_per_token * self.page_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return self.latent_row_bytes * self.num_layers + self.index_row_bytes * len(
            self.index_layers
        )

    def pool_bytes(self, physical_pages: int) -> int:
        """Bytes of a rank's pool, its padding page included."""
        return (physical_pages + 1) * self.bytes_per_page
