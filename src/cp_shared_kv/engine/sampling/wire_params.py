"""What a front end asks for, as the params that travel with its room."""

from __future__ import annotations

import secrets

import msgspec

from cp_shared_kv.engine.api import EngineRefusal, Sampling
from cp_shared_kv.transfer.sampling_params import SamplingParams

SEED_BITS = 63


def wire_params(sampling: Sampling) -> SamplingParams:
    """`sampling` with its bounds checked, and with a random seed where it names none.

    Raises `EngineRefusal` (kind invalid) that names the field.
    """
    seed = sampling.seed
    if seed is None:
        seed = secrets.randbits(SEED_BITS) if sampling.temperature else 0
    plain = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
    plain |= {
        "seed": seed,
        "logit_bias": tuple(sampling.logit_bias.items()),
        "stop_token_ids": tuple(sampling.stop_token_ids),
    }
    try:
        return msgspec.convert(plain, SamplingParams)
    except msgspec.ValidationError as error:
        raise EngineRefusal(f"sampling: {error}", kind="invalid") from error
