"""Servers that speculate: a next-token layer for a model without one, and what it computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.sglang.requests import TOGETHER
from benchmarks.sglang.servers import Server

FLAGS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
)
# The layer below has no experts: in-seq-split takes DeepEP for them, which few machines have.
ENVIRONMENT = {"HARNESS_DENSE_DRAFT": "1", "HARNESS_LOG_DRAFTS": "1"}
_SEED = 20261201
_LINE = re.compile(r"draft (?P<forward>\w+ of \[(?P<names>.*)\] total=\S+) sha=(?P<sha>\w+)")


def with_next_token_layer(model_path: Path, folder: Path) -> Path:
    """A checkpoint beside that one, in `folder`: its files, and a layer that drafts.

    The layer is a copy of the model's last one, whose MLP has to be dense, with random weights
    where a next-token layer has others.
    """
    config = json.loads((model_path / "config.json").read_text())
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    last, added = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names: Iterable[str] = weights.keys()
            tensors |= {
                name.replace(last, added): weights.get_tensor(name)
                for name in names
                if name.startswith(last)
            }
    if not any(name.startswith(f"{added}mlp.down_proj") for name in tensors):
        raise SystemExit(f"{model_path}: its last layer has experts; one that is dense is needed")
    random = torch.Generator().manual_seed(_SEED)
    mixing = torch.randn(width, 2 * width, generator=random) * (2 * width) ** -0.5
    tensors[f"{added}eh_proj.weight"] = mixing.bfloat16()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        scale = 1 + 0.1 * torch.randn(width, generator=random)
        tensors[f"{added}{norm}.weight"] = scale.bfloat16()
    made = folder / f"{model_path.name}-drafts"
    made.mkdir()
    for file in model_path.iterdir():
        if file.name != "config.json":
            (made / file.name).symlink_to(file.resolve())
    (made / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file(tensors, made / "next-token-layer.safetensors", metadata={"format": "pt"})
    return made


def compared(stock: Server, shared: Server) -> dict[str, Any]:
    """Of forwards of one request that both servers' drafts ran: how many, and whose bits differ.

    Which requests share a batch differs from run to run, so forwards of several are left out.
    """
    theirs, ours = _logits(stock), _logits(shared)
    common = sorted(theirs.keys() & ours.keys())
    return {
        "forwards in common": len(common),
        "of": [len(theirs), len(ours)],
        "differ": [forward for forward in common if theirs[forward] != ours[forward]],
    }


def _logits(server: Server) -> dict[str, str]:
    """The digest of its logits by forward, which its request and its tokens name."""
    found: dict[str, str] = {}
    for line in server.lines("draft .* sha="):
        match = _LINE.search(line)
        if match and ";" not in match["names"] and not match["names"].startswith(TOGETHER):
            found[match["forward"]] = match["sha"]
    return found
